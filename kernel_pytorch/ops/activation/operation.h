// activation as the registry sees it.
#pragma once

#include "kernel_pytorch/ops/engines/pointwise/pointwise.h"
#include "kernel_pytorch/registry/kernel.h"

namespace kernel_pytorch::activation {

extern const registry::Operation<pointwise::ForwardProblem> kForward;
extern const registry::Operation<pointwise::BackwardProblem> kBackward;

}  // namespace kernel_pytorch::activation
