// The functions and their derivatives on lanes. Forward, 16-bit rows take words that are as exact as their results need
// (kBits; gelu is a sigmoid of a polynomial there, as on the GPU); derivatives, whose sums may be fp32, the exact ones.
#pragma once

#include "kernel_pytorch/cpu/vec_math.h"
#include "kernel_pytorch/ops/engines/pointwise/cpu/gelu_isa.h"
#include "kernel_pytorch/ops/engines/pointwise/kind_cuda.h"

namespace kernel_pytorch::pointwise::KP_ISA_NAMESPACE {

using cpu::Vec;

inline constexpr int kFloatBits = 24;

#if defined(__AVX512F__)
// Within 1.5e-7 of the value, and zero below -87. The instructions for whole parts and powers save a third of
// cpu::sigmoid's, masks its two selections; ln 2 in two parts keeps the digits that x log2(e) loses.
KP_PRIMITIVE Vec float_sigmoid(Vec x) {
  constexpr int kToNearest = 0x08;  // without exceptions
  const __m512 lanes = reinterpret_cast<__m512>(x);
  const __mmask16 is_normal = _mm512_cmp_ps_mask(lanes, _mm512_set1_ps(-87.0f), _CMP_NLT_UQ);  // NaN is not less
  const Vec bounded = cpu::min(cpu::broadcast(87.0f), x);  // no denormal power; in this order a NaN is handed on
  const Vec units = bounded * -1.44269504f;
  const Vec whole =
      reinterpret_cast<Vec>(_mm512_maskz_roundscale_ps(0xffff, reinterpret_cast<__m512>(units), kToNearest));
  const Vec rest = cpu::fma_once(bounded, cpu::broadcast(-1.925963e-8f),
                                 cpu::fma_once(bounded, cpu::broadcast(-1.44269504f), -whole));
  const Vec fraction = cpu::polynomial(rest, 0.0001534581189f, 0.001339993122f, 0.009618488958f, 0.05550328777f,
                                       0.2402264689f, 0.6931472057f, 1.0f);
  const Vec sum = 1.0f + cpu::scale_by_power(fraction, whole, cpu::VecI{});
  const __m512 estimate = _mm512_maskz_rcp14_ps(0xffff, reinterpret_cast<__m512>(sum));
  const __m512 error = reinterpret_cast<__m512>(1.0f - sum * reinterpret_cast<Vec>(estimate));
  return reinterpret_cast<Vec>(_mm512_maskz_fmadd_ps(is_normal, estimate, error, estimate));
}
#elif defined(__AVX2__)
// The same where a power is added to the exponent's bits: between the bounds it and the result are normal.
KP_PRIMITIVE Vec float_sigmoid(Vec x) {
  constexpr float kRounder = 12582912.0f;  // adding it leaves a whole number in the lowest bits
  const Vec bounded = cpu::max(cpu::broadcast(-87.0f), cpu::min(cpu::broadcast(87.0f), x));  // hands a NaN on
  const Vec rounded = cpu::fma_once(bounded, cpu::broadcast(-1.44269504f), cpu::broadcast(kRounder));
  const Vec rest = cpu::fma_once(bounded, cpu::broadcast(-1.925963e-8f),
                                 cpu::fma_once(bounded, cpu::broadcast(-1.44269504f), kRounder - rounded));
  const Vec fraction = cpu::polynomial(rest, 0.0001534581189f, 0.001339993122f, 0.009618488958f, 0.05550328777f,
                                       0.2402264689f, 0.6931472057f, 1.0f);
  const Vec power = cpu::from_bits(cpu::bits_of(fraction) + (cpu::bits_of(rounded) << 23));
  return cpu::select(x < -87.0f, Vec{}, 1.0f / (1.0f + power));
}
#endif

template <int kBits>
KP_PRIMITIVE Vec sigmoid(Vec x) {
  if constexpr (kBits == kFloatBits) {
#if defined(__AVX2__)
    return float_sigmoid(x);
#else
    return cpu::sigmoid(x);
#endif
  } else {
    // The rough one ends at its least normal number, which a large factor would show: zero from there on.
    return cpu::select(x < -87.0f, Vec{}, cpu::sigmoid_rough<kBits>(x));
  }
}

// Probability of a normal variable below x. sigmoid(x q(x^2)): q is a fit of ours to logit(cdf(x)) / x for |x| < 6,
// within 2^-12.3 (8 bits) and 2^-15 of the value.
template <int kBits>
KP_PRIMITIVE Vec normal_below(Vec x) {
  if constexpr (kBits == kFloatBits) {
    return 0.5f + 0.5f * cpu::erf(x * 0.707106781f);
  } else {
    const Vec square = cpu::min(x * x, cpu::broadcast(36.0f));
    if constexpr (kBits == 8) {
      return sigmoid<kBits>(x * cpu::polynomial(square, -3.59966236e-08f, 2.33749451e-06f, -4.59440642e-05f,
                                                -0.000425037777f, 0.0735188411f, 1.59519451f));
    } else {
      return sigmoid<kBits>(x * cpu::polynomial(square, -6.96888103e-11f, 7.68998198e-09f, -3.56230061e-07f,
                                                8.86082216e-06f, -0.000115099429f, -5.6161236e-05f, 0.0726623461f,
                                                1.59576666f));
    }
  }
}

template <int kBits>
KP_PRIMITIVE Vec gelu_sigmoid(Vec x, Vec square) {
  return sigmoid<kBits>(x * (square * 0.0713548163f + 1.59576912f));
}

// s + x inner' s (1 - s), s = sigmoid(inner). With e = e^-|inner|, s (1 - s) is e / (1 + e)^2: s - s^2 would leave the
// rounding error of s, which the factor enlarges 20 times at x = 4.
KP_PRIMITIVE Vec gelu_tanh_slope(Vec x, Vec square, Vec inner) {
  const Vec e = cpu::exp(-cpu::abs(inner));
  const Vec upper = cpu::reciprocal(1.0f + e);  // sigmoid(|inner|)
  const Vec lower = e * upper;
  return cpu::select(inner < 0.0f, lower, upper) + x * (square * 0.214064449f + 1.59576912f) * (lower * upper);
}

struct Values {
  Vec value;
  Vec derivative;
};

template <Kind kKind, int kBits>
KP_PRIMITIVE Values differentiate(Vec x) {
  const Vec one = cpu::broadcast(1.0f);
  if constexpr (kKind == Kind::kGelu) {
#if defined(__AVX2__)
    return {table_gelu<kBits>(x), table_gelu_slope(x)};
#else
    const Vec below = normal_below<kBits>(x);
    return {x * below, below + x * (0.398942280f * cpu::exp(-0.5f * x * x))};
#endif
  } else if constexpr (kKind == Kind::kGeluTanh && kBits == kFloatBits) {
    const Vec square = x * x;
    const Vec inner = x * (square * 0.0713548163f + 1.59576912f);
    return {x * sigmoid<kFloatBits>(inner), gelu_tanh_slope(x, square, inner)};
  } else if constexpr (kKind == Kind::kGeluTanh) {
    const Vec square = x * x;
    const Vec s = gelu_sigmoid<kBits>(x, square);
    return {x * s, s + x * (square * 0.214064449f + 1.59576912f) * (s - s * s)};
  } else if constexpr (kKind == Kind::kSilu) {
    const Vec s = sigmoid<kBits>(x);
    return {x * s, s + x * (s - s * s)};
  } else if constexpr (kKind == Kind::kRelu) {
    return {cpu::select(x <= 0.0f, Vec{}, x), cpu::select(x <= 0.0f, Vec{}, one)};
  } else if constexpr (kKind == Kind::kReluSquared) {
    const Vec positive = cpu::select(x <= 0.0f, Vec{}, x);
    return {positive * positive, 2.0f * positive};
  } else if constexpr (kKind == Kind::kSigmoid) {
    const Vec s = sigmoid<kBits>(x);
    return {s, s - s * s};
  } else if constexpr (kKind == Kind::kTanh) {
    const Vec t = cpu::tanh(x);
    return {t, one - t * t};
  } else {
    return {x, one};
  }
}

// What is not asked for is not computed: the compiler drops the derivative.
template <Kind kKind, int kBits>
KP_PRIMITIVE Vec function(Vec x) {
  return differentiate<kKind, kBits>(x).value;
}

}  // namespace kernel_pytorch::pointwise::KP_ISA_NAMESPACE
