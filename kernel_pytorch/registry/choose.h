// choose: from a problem to a kernel and its config, through the tiers of tuning/selection.h. The warm path, with
// nothing measured, overlaid or overridden, asks each kernel in order and takes the first yes.
#pragma once

#include "kernel_pytorch/device/rehearsal.h"
#include "kernel_pytorch/registry/kernel.h"
#include "kernel_pytorch/registry/slow_path.h"
#include "kernel_pytorch/tuning/selection.h"

namespace kernel_pytorch::registry {

template <class Problem>
Choice<Problem> choose_by_heuristic(const Operation<Problem>& operation, const Problem& problem,
                                    const DeviceInfo& device) {
  for (const Kernel<Problem>& kernel : operation.kernels()) {
    if (kernel.supports(problem, device)) {
      return {&kernel, kernel.heuristic != nullptr ? kernel.heuristic(problem, device) : 0, tuning::Tier::kHeuristic};
    }
  }
  return {};
}

// Throws kUnsupported with every kernel's reason when nothing supports the problem.
template <class Problem>
Choice<Problem> choose(const Operation<Problem>& operation, const Problem& problem, Context& context) {
  if (context.kernel_override.empty() && !tuning::anything_to_consult() && !Rehearsal::is_running()) [[likely]] {
    const Choice<Problem> choice = choose_by_heuristic(operation, problem, *context.info);
    if (choice.kernel != nullptr) [[likely]]
      return choice;
  }
  return choose_slowly(operation, problem, context);
}

// What an op's entry point calls once its arguments are checked.
template <class Problem>
void run_best(const Operation<Problem>& operation, const Problem& problem, Context& context) {
  const Choice<Problem> choice = choose(operation, problem, context);
  if (Rehearsal::is_running() && !context.info->is_cuda()) return;
  const ScratchScope scope(context.scratch);
  choice.kernel->run(problem, choice.config, context);
}

}  // namespace kernel_pytorch::registry
