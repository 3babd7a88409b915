// What the host sides of the pointwise CUDA kernels share.
#pragma once

#include "kernel_pytorch/base/philox.h"
#include "kernel_pytorch/base/tensor_view.h"
#include "kernel_pytorch/ops/engines/pointwise/cuda/arguments_cuda.h"
#include "kernel_pytorch/ops/engines/pointwise/pointwise.h"
#include "kernel_pytorch/ops/support/cuda_support.h"

namespace kernel_pytorch::pointwise {

inline DropoutArguments dropout_arguments(double probability, const TensorView& seed) {
  const uint32_t threshold = dropout_threshold(probability);
  if (threshold == 0) return {.seed = nullptr, .limit = 0, .scale = 1};
  // 65536 wraps to a limit that nothing exceeds: everything is dropped.
  return {.seed = seed.as<int64_t>(), .limit = (threshold << 16) - 1, .scale = dropout_scale(probability)};
}

inline bool bias_is_float(const TensorView& gate_bias, const TensorView& up_bias) {
  return (gate_bias.is_present() ? gate_bias : up_bias).dtype == DType::kFloat32;
}

}  // namespace kernel_pytorch::pointwise
