// What host and device agree on for the pointwise kernels of fp64.
#pragma once

#include "kernel_pytorch/ops/engines/pointwise/cuda/arguments_cuda.h"

namespace kernel_pytorch::pointwise {

struct DoubleBackwardArguments {
  AnyBackwardArguments rows;               // without partial sums
  AnyTensor grad_gate_bias, grad_up_bias;  // written by blocks that have all rows; absent: not wanted
};

}  // namespace kernel_pytorch::pointwise
