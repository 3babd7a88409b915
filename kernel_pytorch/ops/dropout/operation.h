// dropout as the registry sees it.
#pragma once

#include "kernel_pytorch/ops/engines/pointwise/pointwise.h"
#include "kernel_pytorch/registry/kernel.h"

namespace kernel_pytorch::dropout {

// Throw what the op's calls throw; leave the problem merged.
void check(pointwise::ForwardProblem& problem, Device device);

extern const registry::Operation<pointwise::ForwardProblem> kForward;

}  // namespace kernel_pytorch::dropout
