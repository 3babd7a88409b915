// The delta rule as the registry sees it, and the kernels that its lists name.
#pragma once

#include "kernel_pytorch/ops/linear_attention/delta/delta.h"
#include "kernel_pytorch/ops/linear_attention/operation.h"

namespace kernel_pytorch::linear_attention::delta {

// Throw what the ops throw.
void check(const Forward& problem, Device device);
void check(const Backward& problem, Device device);

extern const registry::Operation<Forward> kForward;
extern const registry::Operation<Backward> kBackward;
extern const registry::Kernel<Forward> kForwardReference, kForwardCpu, kForwardCuda, kForwardSm90;
extern const registry::Kernel<Backward> kBackwardReference, kBackwardCpu, kBackwardCuda, kBackwardSm90;

}  // namespace kernel_pytorch::linear_attention::delta
