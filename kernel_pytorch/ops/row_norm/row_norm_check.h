// Argument checks shared by rms_norm and layer_norm. Each throws kInvalidArgument with the op, the argument, both
// values and the cure, and leaves the problem ready for the kernels: leading dimensions merged.
#pragma once

#include <string_view>

#include "kernel_pytorch/ops/row_norm/row_norm.h"

namespace kernel_pytorch::row_norm {

void check_and_merge(std::string_view op, ForwardProblem& problem, const Context& context);
void check_and_merge(std::string_view op, BackwardProblem& problem, const Context& context);

}  // namespace kernel_pytorch::row_norm
