// dropout as the registry sees it.
#pragma once

#include "kernel_pytorch/ops/engines/pointwise/pointwise.h"
#include "kernel_pytorch/registry/kernel.h"

namespace kernel_pytorch::dropout {

extern const registry::Operation<pointwise::ForwardProblem> kForward;

}  // namespace kernel_pytorch::dropout
