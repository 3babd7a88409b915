// Times kernels against a copy that moves the same bytes, interleaved in one run.
#pragma once

#include "kernel_pytorch/base/export.h"
#include "kernel_pytorch/registry/any_operation.h"
#include "kernel_pytorch/registry/any_problem.h"

namespace kernel_pytorch::registry {

// Fills everything but `request`. The chosen kernel is first; with `every_kernel` every supported kernel and config
// follows. Throws kUnsupported where nothing supports the problem.
KP_EXPORT BenchReport bench(const AnyProblem& problem, bool every_kernel, double seconds_each);

}  // namespace kernel_pytorch::registry
