// Why this kernel: every candidate with its reason, its configs, and the tier that chose.
#pragma once

#include <string_view>
#include <vector>

#include "kernel_pytorch/base/export.h"
#include "kernel_pytorch/registry/any_operation.h"
#include "kernel_pytorch/registry/any_problem.h"

namespace kernel_pytorch::registry {

// The one question about what kernels can do: every caller that decides by it asks here.
KP_EXPORT std::vector<KernelSupport> supports(const AnyProblem& problem);
KP_EXPORT std::vector<CandidateExplanation> explain_candidates(const AnyProblem& problem);
// Measures nothing, so where autotuning is on it shows what would be taken without it.
KP_EXPORT Explanation explain(const AnyProblem& problem, std::string_view kernel_override);

}  // namespace kernel_pytorch::registry
