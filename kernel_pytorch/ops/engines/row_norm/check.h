// Argument checks shared by rms_norm and layer_norm. Each throws kInvalidArgument with the op, the argument, both
// values and the cure, and leaves the problem ready for the kernels: its norm set, leading dimensions merged.
#pragma once

#include "kernel_pytorch/base/device.h"
#include "kernel_pytorch/ops/engines/row_norm/row_norm.h"

namespace kernel_pytorch::row_norm {

void check_and_merge(Norm norm, ForwardProblem& problem, Device device);
void check_and_merge(Norm norm, BackwardProblem& problem, Device device);

}  // namespace kernel_pytorch::row_norm
