// rms_norm as the registry sees it.
#pragma once

#include "kernel_pytorch/ops/engines/row_norm/row_norm.h"
#include "kernel_pytorch/registry/kernel.h"

namespace kernel_pytorch::rms_norm {

extern const registry::Operation<row_norm::ForwardProblem> kForward;
extern const registry::Operation<row_norm::BackwardProblem> kBackward;

}  // namespace kernel_pytorch::rms_norm
