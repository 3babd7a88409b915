#include "kernel_pytorch/registry/explain.h"

#include "kernel_pytorch/registry/slow_path.h"

namespace kernel_pytorch::registry {

std::vector<CandidateExplanation> explain_candidates(const AnyProblem& problem) {
  std::vector<CandidateExplanation> candidates;
  for (int i = 0; i < problem.kernel_count(); ++i) {
    CandidateExplanation candidate;
    candidate.kernel = problem.kernel_name(i);
    candidate.origin = problem.kernel_origin(i);
    const Support support = problem.supports(i);
    candidate.supported = static_cast<bool>(support);
    candidate.reason = support.reason();
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

}  // namespace kernel_pytorch::registry
