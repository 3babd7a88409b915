// What happens to an element, written once for the reference (a float), CPU lanes and GPU threads. `Math` has the
// operations, each of which rounds once: mul, add, sub, fma, root (of numbers from kLeastSquare on, of smaller ones 0),
// reciprocal (of normal numbers), abs, at_least and larger (maxima that hand a NaN on), sign, bits,
// min_bits, max_bits (unsigned), quiet_bits (with one NaN for all). Values and numbers may be mixed.
// root and reciprocal leave out what would make a GPU's short sequences branch.
#pragma once

#include "kernel_pytorch/ops/optimizer_step/factors_cuda.h"

namespace kernel_pytorch::optimizer_step {

inline constexpr float kLeastSquare = 0x1p-100f, kLeastDenominator = 0x1p-100f, kLeastScale = 0x1p-126f;

template <class Value>
struct Element {
  Value parameter, gradient, first, second;
  Value maximum;  // of amsgrad
  Value root;     // of second, or of the maximum, after the step
};
struct Keeps {
  bool first;    // sgd may go without
  bool maximum;  // amsgrad
};

template <class Math, Rule kRule, class Value, class Real>
KP_STEP_CODE void update(Element<Value>& element, Keeps keeps, const FactorsOf<Real>& factors) {
  Value gradient = Math::mul(element.gradient, factors.gradient);
  if constexpr (kRule == Rule::kAdamW) {
    element.first = Math::fma(Math::sub(gradient, element.first), factors.first, element.first);
    const Value kept = Math::mul(element.second, factors.beta2);
    element.second = Math::fma(Math::mul(gradient, gradient), factors.second, kept);
    if (keeps.maximum) element.maximum = Math::larger(element.second, element.maximum);
    element.root = Math::root(keeps.maximum ? element.maximum : element.second);
    const Value denominator = Math::fma(element.root, factors.root, factors.eps);
    const Value direction = Math::mul(element.first, Math::reciprocal(Math::at_least(denominator, kLeastDenominator)));
    element.parameter = Math::fma(direction, factors.rate, Math::mul(element.parameter, factors.keep));
  } else if constexpr (kRule == Rule::kLion) {
    const Value difference = Math::sub(gradient, element.first);
    const Value direction = Math::sign(Math::fma(difference, factors.first, element.first));
    element.parameter = Math::fma(direction, factors.rate, Math::mul(element.parameter, factors.keep));
    element.first = Math::fma(difference, factors.second, element.first);
  } else {
    gradient = Math::fma(element.parameter, factors.decay, gradient);
    if (keeps.first) {
      element.first = Math::fma(element.first, factors.first, Math::mul(gradient, factors.second));
      gradient = factors.is_nesterov ? Math::fma(element.first, factors.momentum, gradient) : element.first;
    }
    element.parameter = Math::fma(gradient, factors.rate, element.parameter);
  }
}

// The master of a bf16 weight and its correction. Casts keep the bits, of single numbers and of lanes.
template <class Bits, class Signed>
KP_STEP_CODE Bits master_bits(Bits weight, Signed correction) {
  const Bits wide = weight << 16;
  const Bits moved = wide + (Bits)(correction * 256);
  return (Signed)(moved ^ wide) < 0 ? wide : moved;  // below zero: the parameter is 0
}
// With the weight in the upper half after adding 0x8000, and the correction in bits 8 to 15.
template <class Math, class Value>
KP_STEP_CODE auto rounded_master(Value master) {
  return Math::quiet_bits(master) + 0x80u;
}

// A group's largest magnitude, as bits, to what its elements are multiplied by. Magnitudes below the normal numbers
// become 0; a NaN stays in the scale.
template <class Math>
KP_STEP_CODE float inverse_of_scale(float scale) {
  return scale >= kLeastScale ? Math::scalar_reciprocal(scale) : 0.0f;
}

// The companded storage: codes in the lowest byte, with other bits above. The sum of a small number and 1.5 * 2^23 has
// the nearest integer in its lowest bits.
template <class Math, class Value>
KP_STEP_CODE auto first_code(Value value, float inverse_scale) {
  const Value x = Math::mul(value, inverse_scale);
  return Math::bits(Math::fma(Math::mul(x, 254.0f), Math::reciprocal(Math::add(Math::abs(x), 1.0f)), 0x1.8p23f));
}
// At least 1 where the root is not 0.
template <class Math, class Value>
KP_STEP_CODE auto root_code(Value root, float inverse_scale_255) {
  const auto least = Math::min_bits(Math::bits(root), 1u) + 0x4b400000u;  // the bits of 1.5 * 2^23
  return Math::max_bits(Math::bits(Math::fma(root, inverse_scale_255, 0x1.8p23f)), least);
}
inline constexpr float kRootUnit = 1.0f / 255.0f;

}  // namespace kernel_pytorch::optimizer_step
