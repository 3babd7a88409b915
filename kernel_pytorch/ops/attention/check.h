// The checks of attention: what kernels may rely on afterwards. Every failure names the op, the argument, both values
// and the cure.
#pragma once

#include "kernel_pytorch/ops/attention/operation.h"

namespace kernel_pytorch::attention {

void check(const ForwardProblem& problem, Device device);
void check(const BackwardProblem& problem, Device device);
// The values of packed sequences' offsets, where the host may read them.
void check_offsets(std::string_view op, const Scoring& scoring, const Sizes& sizes, const Context& context);

// The checks, then the best kernel: where every caller ends.
void check_and_run(const ForwardProblem& problem, Context& context);
void check_and_run(const BackwardProblem& problem, Context& context);

}  // namespace kernel_pytorch::attention
