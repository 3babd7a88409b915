// attention as the registry sees it: checked arguments and the kernels that compute them.
#pragma once

#include "kernel_pytorch/ops/attention/attention.h"
#include "kernel_pytorch/registry/kernel.h"

namespace kernel_pytorch::attention {

using ForwardProblem = Forward;
using BackwardProblem = Backward;

extern const registry::Kernel<ForwardProblem> kForwardReference;
extern const registry::Kernel<BackwardProblem> kBackwardReference;

extern const registry::Operation<ForwardProblem> kForward;
extern const registry::Operation<BackwardProblem> kBackward;

}  // namespace kernel_pytorch::attention
