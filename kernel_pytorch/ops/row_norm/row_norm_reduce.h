// Host side of reduce_partials: where a backward kernel puts its partial rows, and the launch that sums them.
#pragma once

#include "kernel_pytorch/device/context.h"
#include "kernel_pytorch/ops/row_norm/row_norm.h"

namespace kernel_pytorch::row_norm {

struct Partials {
  float* weight = nullptr;  // [count, columns] each, null where the gradient is not wanted
  float* bias = nullptr;
};

// Scratch memory for `count` partial rows of every gradient that the problem wants.
Partials allocate_partials(const BackwardProblem& problem, int64_t count, Context& context);
// Sums them in order into grad_weight and grad_bias; may be scheduled before the kernel ahead has ended.
void reduce(const BackwardProblem& problem, const Partials& partials, int64_t count, Context& context);
// Gradients of no rows.
void zero_parameter_gradients(const BackwardProblem& problem, Context& context);
std::vector<DeviceCode> reduce_device_code();

}  // namespace kernel_pytorch::row_norm
