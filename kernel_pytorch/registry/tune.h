// Tries every supported kernel and config of a problem on buffers of its own and remembers the fastest right one.
#pragma once

#include "kernel_pytorch/base/export.h"
#include "kernel_pytorch/device/context.h"
#include "kernel_pytorch/registry/any_problem.h"
#include "kernel_pytorch/tuning/autotuner.h"

namespace kernel_pytorch::registry {

// Kernels and configs that tune() would try.
KP_EXPORT int candidate_count(const AnyProblem& problem);

// The reference is tried only where nothing else supports the problem. What the heuristic would take is tried first, so
// that a budget or an interrupt never leaves something worse remembered.
KP_EXPORT tuning::TuneReport tune(const AnyProblem& problem, const Context& context,
                                  const tuning::TuneOptions& options);
// On a context of our own.
KP_EXPORT tuning::TuneReport tune(const AnyProblem& problem, const tuning::TuneOptions& options);

}  // namespace kernel_pytorch::registry
