// The numbers that all elements of a parameter share, in double on host and device alike: the same operations in the
// same order, so that both round to the same numbers. Powers are products, since exp and log differ between libraries.
#pragma once

#include "kernel_pytorch/ops/optimizer_step/format_cuda.h"

namespace kernel_pytorch::optimizer_step {

// Options of a step, as a kernel gets them.
struct Rates {
  double lr, beta1, beta2, eps, weight_decay, dampening, max_norm;
  bool nesterov, maximize;
};

// What the device knows: values of the optional tensors, or what stands for an absent one.
struct Signals {
  double lr, grad_scale, total_norm, steps_taken;
  bool has_norm;
};

template <class Real>
struct FactorsOf {
  Real gradient;  // multiplies it
  Real keep;      // 1 - lr * weight_decay
  Real rate;      // -lr; adamw: -lr / (1 - beta1^step)
  Real root;      // adamw: 1 / sqrt(1 - beta2^step)
  Real first;     // 1 - beta1; sgd: beta1, or 0 in the first step
  Real second;    // 1 - beta2; sgd: 1 - dampening, or 1 in the first step
  Real beta2;     // adamw
  Real eps;       // adamw
  Real decay;     // sgd: weight_decay
  Real momentum;  // sgd: beta1
  bool is_nesterov;
};
using Factors = FactorsOf<float>;  // of every kernel; the reference takes fp64 parameters in double

#ifdef __CUDACC_RTC__
KP_STEP_CODE double product(double a, double b) {
  return __dmul_rn(a, b);  // never part of an FMA
}
KP_STEP_CODE double root_of(double x) {
  return __dsqrt_rn(x);
}
#else
KP_STEP_CODE double product(double a, double b) {
  return a * b;
}
KP_STEP_CODE double root_of(double x) {
  return __builtin_sqrt(x);
}
#endif

KP_STEP_CODE double power(double base, int64_t exponent) {
  double result = 1;
  for (; exponent > 0; exponent >>= 1) {
    if (exponent & 1) result = product(result, base);
    base = product(base, base);
  }
  return result;
}

// In three parts that need nothing of each other.
inline constexpr int kFactorParts = 3;
template <class Real>
KP_STEP_CODE void set_factors_part(FactorsOf<Real>& factors, int part, Rule rule, const Rates& rates,
                                   const Signals& signals) {
  const int64_t step = static_cast<int64_t>(signals.steps_taken) + 1;
  const bool is_adamw = rule == Rule::kAdamW, is_sgd = rule == Rule::kSgd, is_first = step == 1;
  if (part == 0) {
    double gradient = (rates.maximize ? -1.0 : 1.0) / signals.grad_scale;
    if (signals.has_norm) {
      const double clip = rates.max_norm / (signals.total_norm / signals.grad_scale + 1e-6);
      gradient = product(gradient, clip >= 1 ? 1.0 : clip);  // NaN clips to NaN
    }
    factors.gradient = static_cast<Real>(gradient);
    factors.keep = static_cast<Real>(1 - product(signals.lr, rates.weight_decay));
    factors.first = static_cast<Real>(!is_sgd ? 1 - rates.beta1 : is_first ? 0.0 : rates.beta1);
    factors.second = static_cast<Real>(!is_sgd ? 1 - rates.beta2 : is_first ? 1.0 : 1 - rates.dampening);
    factors.beta2 = static_cast<Real>(rates.beta2);
    factors.eps = static_cast<Real>(rates.eps);
    factors.decay = static_cast<Real>(rates.weight_decay);
    factors.momentum = static_cast<Real>(rates.beta1);
    factors.is_nesterov = rates.nesterov;
  } else if (part == 1) {
    factors.rate = static_cast<Real>(is_adamw ? -signals.lr / (1 - power(rates.beta1, step)) : -signals.lr);
  } else {
    factors.root = static_cast<Real>(is_adamw ? 1 / root_of(1 - power(rates.beta2, step)) : 1.0);
  }
}

}  // namespace kernel_pytorch::optimizer_step
