#include "kernel_pytorch/registry/explain.h"

#include "kernel_pytorch/registry/slow_path.h"

namespace kernel_pytorch::registry {

std::vector<KernelSupport> supports(const AnyProblem& problem) {
  std::vector<KernelSupport> kernels;
  for (int i = 0; i < problem.kernel_count(); ++i) {
    const Support support = problem.supports(i);
    kernels.push_back({.kernel = std::string(problem.kernel_name(i)),
                       .origin = problem.kernel_origin(i),
                       .supported = static_cast<bool>(support),
                       .reason = std::string(support.reason()),
                       .is_fallback = problem.is_fallback(i)});
  }
  return kernels;
}

std::vector<CandidateExplanation> explain_candidates(const AnyProblem& problem) {
  std::vector<CandidateExplanation> candidates;
  int i = -1;
  for (KernelSupport& support : supports(problem)) {
    ++i;
    CandidateExplanation candidate{std::move(support)};
    if (candidate.supported) {
      candidate.configs = problem.configs(i);
      candidate.heuristic_config = candidate.configs.at(static_cast<size_t>(problem.heuristic(i)));
    }
    candidates.push_back(std::move(candidate));
  }
  return candidates;
}

Explanation explain(const AnyProblem& problem, std::string_view kernel_override) {
  Explanation explanation;
  explanation.key = make_key(problem);
  explanation.device = problem.device().name;
  explanation.candidates = explain_candidates(problem);
  for (const auto& part : problem.parts()) explanation.parts.push_back(explain(*part, ""));
  const Selected selected = preview(problem, kernel_override);
  explanation.tier = selected.tier;
  if (selected.kernel < 0) return explanation;
  explanation.chosen_kernel = problem.kernel_name(selected.kernel);
  explanation.chosen_config = problem.configs(selected.kernel).at(static_cast<size_t>(selected.config));
  const auto remembered = tuning::find_measured(explanation.key);
  if (remembered && remembered->measurement.kernel == explanation.chosen_kernel &&
      remembered->measurement.config == explanation.chosen_config) {
    explanation.measured_us = remembered->measurement.median_us;
  }
  return explanation;
}

namespace {
thread_local std::vector<Explanation>* explained = nullptr;
}  // namespace

Explaining::Explaining(std::vector<Explanation>& list) {
  explained = &list;
}
Explaining::~Explaining() {
  explained = nullptr;
}
void Explaining::add(const AnyProblem& problem, std::string_view kernel_override) {
  if (explained != nullptr) explained->push_back(explain(problem, kernel_override));
}

}  // namespace kernel_pytorch::registry
