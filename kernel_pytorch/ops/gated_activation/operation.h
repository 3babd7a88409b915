// gated_activation as the registry sees it.
#pragma once

#include "kernel_pytorch/ops/engines/pointwise/pointwise.h"
#include "kernel_pytorch/registry/kernel.h"

namespace kernel_pytorch::gated_activation {

// Throw what the op's calls throw; leave the problem merged.
void check(pointwise::ForwardProblem& problem, Device device);
void check(pointwise::BackwardProblem& problem, Device device);

extern const registry::Operation<pointwise::ForwardProblem> kForward;
extern const registry::Operation<pointwise::BackwardProblem> kBackward;

}  // namespace kernel_pytorch::gated_activation
