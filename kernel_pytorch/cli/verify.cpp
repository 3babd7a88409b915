// kpt verify: every supported kernel and config against the reference on random data, over each op's own shapes or the
// ones asked for. One line for each problem, a total at the end, exit code 1 when anything was wrong.
#include <charconv>
#include <chrono>

#include "kernel_pytorch/base/error.h"
#include "kernel_pytorch/cli/command.h"
#include "kernel_pytorch/cli/format.h"
#include "kernel_pytorch/cli/interrupt.h"
#include "kernel_pytorch/cli/json_output.h"
#include "kernel_pytorch/cli/problem_arguments.h"
#include "kernel_pytorch/cli/terminal.h"
#include "kernel_pytorch/cli/verification.h"
#include "kernel_pytorch/device/cuda/capability.h"

namespace kernel_pytorch::cli {
namespace {

struct VerifyArguments {
  ProblemArguments problem;
  std::string capability;  // "sm_80": as which the GPU is used
  bool json = false;
  bool quiet = false;
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
Verification verify_one(const NamedProblem& problem) {
  Verification outcome;
  outcome.problem = problem;
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

void print_outcome(const Verification& outcome) {
  const std::string mark = outcome.failed()   ? paint(Color::kRed, "✗")
                           : outcome.passed() ? paint(Color::kGreen, "✓")
                                              : paint(Color::kDim, "○");
  const std::string note = outcome.failed() || outcome.passed()
                               ? format("{} kernels, {:.2f} s", outcome.kernels, outcome.seconds)
                               : std::string("no kernel supports it here");
  print("{} {:<72} {}\n", mark, problem_text(outcome.problem), paint(Color::kDim, note));
  for (const std::string& failure : outcome.failures) print("    {}\n", paint(Color::kRed, failure));
  std::fflush(stdout);
}

// "sm_86" as 86. Only before a device is asked for, which is why the command does it first.
int capability_in(const std::string& text) {
  const std::string_view digits = std::string_view(text).substr(text.starts_with("sm_") ? 3 : 0);
  int number = 0;
  const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), number);
  if (error != std::errc() || end != digits.data() + digits.size()) {
    throw UsageError(format("verify: --as takes a compute capability as sm_80, not \"{}\"", text));
  }
  return number;
}

int verify(const VerifyArguments& arguments) {
  const InterruptGuard guard;
  if (!arguments.capability.empty()) {
    if (arguments.problem.device == "cpu") throw UsageError("verify: --as is for a GPU; say --device cuda too");
    set_pretended_capability(capability_in(arguments.capability));
  }
  std::vector<Verification> outcomes;
  int passed = 0, failed = 0;
  for (const NamedProblem& problem : problems_of(arguments)) {
    if (InterruptGuard::interrupted()) break;
    outcomes.push_back(verify_one(problem));
    const Verification& outcome = outcomes.back();
    passed += outcome.passed();
    failed += outcome.failed();
    if (!arguments.json && !(arguments.quiet && !outcome.failed())) print_outcome(outcome);
  }
  const int unsupported = static_cast<int>(outcomes.size()) - passed - failed;
  if (arguments.json) {
    print_text(verifications_json(outcomes));
  } else {
    print("{} passed, {} failed{}\n", passed, failed,
          unsupported > 0 ? format(", {} not supported on {}", unsupported, arguments.problem.device) : "");
  }
  if (InterruptGuard::interrupted()) return kInterrupted;
  return failed > 0 || passed == 0 ? kFailure : kSuccess;
}

}  // namespace

void add_verify(Command root) {
  Command command = root.subcommand("verify", "Check every kernel and config against the reference");
  auto arguments = std::make_shared<VerifyArguments>();
  add_problem_arguments(command, arguments->problem, Need::kOptional);
  command
      .text("--as", arguments->capability,
            "a compute capability, as sm_80: its kernels are chosen, within its shared memory, and compiled for it")
      .flag("--quiet,-q", arguments->quiet, "only failures and the total")
      .flag("--json", arguments->json, "as JSON")
      .runs([arguments] { return verify(*arguments); });
}

}  // namespace kernel_pytorch::cli
