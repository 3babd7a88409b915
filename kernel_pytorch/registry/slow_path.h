// The part of choose() that is not the warm path: overrides, overlays, measurements, autotuning, errors. Works on an
// AnyProblem, so that one copy of it serves every op.
#pragma once

#include <string>

#include "kernel_pytorch/base/export.h"
#include "kernel_pytorch/device/context.h"
#include "kernel_pytorch/registry/any_problem.h"
#include "kernel_pytorch/registry/kernel.h"
#include "kernel_pytorch/tuning/key.h"
#include "kernel_pytorch/tuning/selection.h"

namespace kernel_pytorch::registry {

template <class Problem>
struct Choice {
  const Kernel<Problem>* kernel = nullptr;
  int config = 0;
  tuning::Tier tier = tuning::Tier::kError;
};

struct Selected {
  int kernel = -1;  // -1: nothing supports the problem
  int config = 0;
  tuning::Tier tier = tuning::Tier::kError;
};

// Through all tiers. Throws kUnsupported with every kernel's reason when nothing supports the problem, kInvalidArgument
// for an override or overlay that names what does not exist.
KP_EXPORT Selected select(const AnyProblem& problem, Context& context);

// The same without measuring, recording or throwing for want of a kernel: for explain.
KP_EXPORT Selected preview(const AnyProblem& problem, std::string_view kernel_override);

// The key of a problem. Its kernel set is hashed once per op.
KP_EXPORT tuning::Key make_key(const AnyProblem& problem);

template <class Problem>
[[gnu::noinline]] Choice<Problem> choose_slowly(const Operation<Problem>& operation, const Problem& problem,
                                                Context& context) {
  const BorrowedProblem<Problem> any(operation, problem, *context.info);
  const Selected selected = select(any, context);
  return {&operation.kernels()[selected.kernel], selected.config, selected.tier};
}

}  // namespace kernel_pytorch::registry
