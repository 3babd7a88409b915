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

// While it lives, every choice of this thread's rehearsals (device/rehearsal.h) is explained into the list.
class KP_EXPORT Explaining {
 public:
  explicit Explaining(std::vector<Explanation>& list);
  ~Explaining();
  Explaining(const Explaining&) = delete;
  Explaining& operator=(const Explaining&) = delete;
  static void add(const AnyProblem& problem, std::string_view kernel_override);  // does nothing where none lives
};

}  // namespace kernel_pytorch::registry
