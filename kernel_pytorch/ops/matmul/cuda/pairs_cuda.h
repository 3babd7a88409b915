// What host and device agree on for the gradient of gated pairs.
#pragma once

#include "kernel_pytorch/base/fixed_width.h"
#include "kernel_pytorch/ops/engines/pointwise/kind_cuda.h"

namespace kernel_pytorch::matmul {

inline constexpr int kPairThreads = 256;

struct PairArguments {
  const void* grad_output;
  const void* saved;
  void* grad_input;
  int64_t grad_output_row, saved_row, grad_input_row;  // strides
  int64_t rows;
  int32_t columns;  // pairs
  pointwise::Kind kind;
};

}  // namespace kernel_pytorch::matmul
