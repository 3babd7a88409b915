// kpt explain: which kernel a problem gets, which tier said so, and why every other kernel did not get it.

#include "kernel_pytorch/cli/command.h"
#include "kernel_pytorch/cli/format.h"
#include "kernel_pytorch/cli/json_output.h"
#include "kernel_pytorch/cli/problem_arguments.h"
#include "kernel_pytorch/cli/terminal.h"

namespace kernel_pytorch::cli {
namespace {

struct ExplainArguments {
  ProblemArguments problem;
  std::string kernel;
  bool json = false;
};

std::string verdict_of(const registry::CandidateExplanation& candidate) {
  if (!candidate.supported) return candidate.reason;
  if (candidate.configs.size() <= 1) return candidate.heuristic_config.empty() ? "-" : candidate.heuristic_config;
  return format("{} (of {} configs)", candidate.heuristic_config, candidate.configs.size());
}

void print_choice(const std::string& title, const registry::Explanation& explanation) {
  print("{}\n", paint(Color::kBold, title));
  Table table({"", "KERNEL", "ORIGIN", "CONFIG, OR WHY NOT"});
  for (const registry::CandidateExplanation& candidate : explanation.candidates) {
    const bool is_chosen = candidate.kernel == explanation.chosen_kernel;
    const Cell mark = is_chosen             ? Cell("→", Color::kGreen)
                      : candidate.supported ? Cell("✓", Color::kPlain)
                                            : Cell("✗", Color::kDim);
    table.add({mark,
               {candidate.kernel, is_chosen ? Color::kGreen : Color::kPlain},
               candidate.origin == registry::Origin::kOurs ? "ours" : "vendor",
               {verdict_of(candidate), candidate.supported ? Color::kPlain : Color::kDim}});
  }
  print("{}", table.text());
  if (explanation.chosen_kernel.empty()) {
    print("  {}\n\n", paint(Color::kRed, "no kernel supports this problem"));
    return;
  }
  const std::string config = explanation.chosen_config.empty() ? "" : " " + explanation.chosen_config;
  const std::string measured =
      explanation.measured_us > 0 ? ", measured " + microseconds_text(explanation.measured_us) : "";
  print("  chosen: {}{}, by tier {}{}\n  key: {} | {}\n\n", explanation.chosen_kernel, config,
        name_of(explanation.tier), measured, explanation.key.problem, explanation.key.device);
}

void print_explanation(const std::string& title, const registry::Explanation& explanation) {
  print_choice(title, explanation);
  for (size_t i = 0; i < explanation.parts.size(); ++i) {
    const registry::Explanation& part = explanation.parts[i];
    print_explanation(format("{}, part {} of {}: {}", title, i + 1, explanation.parts.size(), part.key.op), part);
  }
}

int explain(const ExplainArguments& arguments) {
  std::vector<registry::Explanation> explanations;
  int exit_code = kSuccess;
  for (const NamedProblem& problem : named_problems(arguments.problem)) {
    explanations.push_back(problem.operation->explain(problem.request, arguments.kernel));
    if (explanations.back().chosen_kernel.empty()) exit_code = kFailure;
    if (!arguments.json) print_explanation(problem_text(problem), explanations.back());
  }
  if (arguments.json) print_text(explanations_json(explanations));
  return exit_code;
}

}  // namespace

void add_explain(Command root) {
  Command command = root.subcommand("explain", "Which kernel a problem gets, and why not another");
  auto arguments = std::make_shared<ExplainArguments>();
  add_problem_arguments(command, arguments->problem, Need::kRequired);
  command.text("--kernel,-k", arguments->kernel, "as if the call asked for it: \"name\" or \"name config\"")
      .flag("--json", arguments->json, "as JSON")
      .runs([arguments] { return explain(*arguments); });
}

}  // namespace kernel_pytorch::cli
