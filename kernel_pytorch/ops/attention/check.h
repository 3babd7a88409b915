// The checks of attention: what kernels may rely on afterwards. Every failure names the op, the argument, both values
// and the cure.
#pragma once

#include "kernel_pytorch/ops/attention/problem.h"

namespace kernel_pytorch::attention {

void check_forward(const ForwardProblem& arguments, const Context& context);
void check_backward(const BackwardProblem& arguments, const Context& context);

// The checks, then the best kernel: where every caller ends.
void check_and_run(const ForwardProblem& problem, Context& context);
void check_and_run(const BackwardProblem& problem, Context& context);

}  // namespace kernel_pytorch::attention
