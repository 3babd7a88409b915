// kpt verify: every supported kernel and config against the reference on random data, over each op's own shapes or the
// ones asked for. One line for each problem, a total at the end, exit code 1 when anything was wrong.
#include <chrono>

#include <fmt/format.h>

#include "kernel_pytorch/base/error.h"
#include "kernel_pytorch/c/report.h"
#include "kernel_pytorch/cli/command.h"
#include "kernel_pytorch/cli/interrupt.h"
#include "kernel_pytorch/cli/problem_arguments.h"
#include "kernel_pytorch/cli/terminal.h"

namespace kernel_pytorch::cli {
namespace {

struct VerifyArguments {
  ProblemArguments problem;
  bool json = false;
  bool quiet = false;
};

struct Outcome {
  int kernels = 0;  // supported, the reference among them
  std::vector<std::string> failures;
  double seconds = 0;
};

std::vector<NamedProblem> problems_of(const VerifyArguments& arguments) {
  if (!arguments.problem.shapes.empty()) return named_problems(arguments.problem);
  if (!arguments.problem.dtypes.empty() || !arguments.problem.options.empty()) {
    throw UsageError("verify: --dtype and --option need --shape; without it the op's own shapes are used");
  }
  const Device device = named_device(arguments.problem.device);
  std::vector<NamedProblem> problems;
  for (const registry::AnyOperation* operation : named_operations(arguments.problem.op)) {
    for (registry::ProblemRequest& request : operation->shapes()) {
      request.device = device;
      problems.push_back({operation, std::move(request)});
    }
  }
  return problems;
}

// A kernel that throws is a failure of that problem, and the others still run.
Outcome verify_one(const NamedProblem& problem) {
  Outcome outcome;
  const auto start = std::chrono::steady_clock::now();
  try {
    for (const auto& candidate : problem.operation->candidates(problem.request)) outcome.kernels += candidate.supported;
    if (outcome.kernels > 0) outcome.failures = problem.operation->verify(problem.request);
  } catch (const std::exception& error) {
    outcome.failures.push_back(error.what());
  }
  outcome.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  return outcome;
}

void print_outcome(const NamedProblem& problem, const Outcome& outcome, bool quiet) {
  const bool passed = outcome.failures.empty();
  if (quiet && passed) return;
  const std::string mark = !passed               ? paint(Color::kRed, "✗")
                           : outcome.kernels > 0 ? paint(Color::kGreen, "✓")
                                                 : paint(Color::kDim, "○");
  const std::string note = outcome.kernels > 0 || !passed
                               ? fmt::format("{} kernels, {:.2f} s", outcome.kernels, outcome.seconds)
                               : std::string("no kernel supports it here");
  fmt::print("{} {:<72} {}\n", mark, problem_text(problem), paint(Color::kDim, note));
  for (const std::string& failure : outcome.failures) fmt::print("    {}\n", paint(Color::kRed, failure));
  std::fflush(stdout);
}

int verify(const VerifyArguments& arguments) {
  const std::vector<NamedProblem> problems = problems_of(arguments);
  const InterruptGuard guard;
  c_interface::Json all = c_interface::Json::array();
  int passed = 0, failed = 0, unsupported = 0;
  for (const NamedProblem& problem : problems) {
    if (InterruptGuard::interrupted()) break;
    const Outcome outcome = verify_one(problem);
    const bool is_right = outcome.failures.empty();
    ++(!is_right ? failed : outcome.kernels > 0 ? passed : unsupported);
    if (arguments.json) {
      all.push_back({{"op", problem.operation->name},
                     {"problem", c_interface::report(problem.request)},
                     {"kernels", outcome.kernels},
                     {"failures", outcome.failures},
                     {"seconds", outcome.seconds}});
    } else {
      print_outcome(problem, outcome, arguments.quiet);
    }
  }
  if (arguments.json) {
    print_line(c_interface::to_text(
        {{"passed", passed}, {"failed", failed}, {"unsupported", unsupported}, {"problems", all}}, 2));
  } else {
    const std::string rest =
        unsupported > 0 ? fmt::format(", {} not supported on {}", unsupported, arguments.problem.device) : "";
    fmt::print("{} passed, {} failed{}\n", passed, failed, rest);
  }
  if (InterruptGuard::interrupted()) return kInterrupted;
  return failed > 0 || passed == 0 ? kFailure : kSuccess;
}

}  // namespace

void add_verify(CLI::App& app, Run& run) {
  CLI::App* command = app.add_subcommand("verify", "Check every kernel and config against the reference");
  auto arguments = std::make_shared<VerifyArguments>();
  add_problem_arguments(*command, arguments->problem, Demand::kNothing);
  command->add_flag("--quiet,-q", arguments->quiet, "only failures and the total");
  command->add_flag("--json", arguments->json, "as JSON");
  command->callback([&run, arguments] { run = [arguments] { return verify(*arguments); }; });
}

}  // namespace kernel_pytorch::cli
