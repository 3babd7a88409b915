// The numbers that all elements of a parameter share, on the host: what remains for an element is a dozen operations.
// Bias corrections come from expm1, since 1 - 0.999^1 taken in fp32 would be wrong in its fifth digit.
#pragma once

#include <cmath>

#include "kernel_pytorch/ops/adamw/adamw.h"

namespace kernel_pytorch::adamw {

inline double log_of_beta(double beta) {
  return beta == 0 ? -1e30 : std::log(beta);  // low enough that every power of it is 0
}

// Factors of one parameter at its step, for the CPU kernels, which may read the signals.
struct Factors {
  double gradient;   // multiplies it
  double keep;       // 1 - lr * weight_decay
  double step_size;  // lr / (1 - beta1^step)
  double root;       // 1 / sqrt(1 - beta2^step)
};

inline double signal(const TensorView& view, double absent) {
  return view.is_present() ? static_cast<double>(*view.as<const float>()) : absent;
}

inline bool is_skipped(const Step& step) {
  return signal(step.found_inf, 0) != 0;
}

inline Factors factors_of(const Step& step, const Parameter& one) {
  const double lr = signal(step.lr_tensor, step.lr), scale = signal(step.grad_scale, 1),
               count = signal(one.step, 0) + 1;
  double gradient = (step.maximize ? -1 : 1) / scale;
  if (step.total_norm.is_present()) {
    const double clip = step.max_norm / (signal(step.total_norm, 0) / scale + 1e-6);
    gradient *= clip < 1 || std::isnan(clip) ? clip : 1;
  }
  return {.gradient = gradient,
          .keep = 1 - lr * step.weight_decay,
          .step_size = lr / -std::expm1(count * log_of_beta(step.beta1)),
          .root = 1 / std::sqrt(-std::expm1(count * log_of_beta(step.beta2)))};
}

// Philox blocks of the parameters: where in the list's count of elements each begins, over 8.
inline std::vector<int64_t> random_starts(const Step& step) {
  std::vector<int64_t> starts;
  int64_t start = 0;
  for (const Parameter& one : step.parameters) {
    starts.push_back(start);
    start += (one.parameter.element_count() + 7) / 8;
  }
  return starts;
}

}  // namespace kernel_pytorch::adamw
