// kpt doctor: the findings of diagnosis.h for a person, and the same as a block to paste into an issue. Exit code 1
// when a self-test fails; other problems are advice, so that scripts may show it.

#include "kernel_pytorch/cli/command.h"
#include "kernel_pytorch/cli/diagnosis.h"
#include "kernel_pytorch/cli/format.h"
#include "kernel_pytorch/cli/json_output.h"
#include "kernel_pytorch/cli/terminal.h"

namespace kernel_pytorch::cli {
namespace {

struct DoctorArguments {
  bool json = false;
  bool no_self_test = false;
  double python_seconds = 30;  // a cold disk takes long over torch
};

std::string mark_of(Health health) {
  return health == Health::kGood   ? paint(Color::kGreen, "✓")
         : health == Health::kNote ? paint(Color::kYellow, "○")
                                   : paint(Color::kRed, "✗");
}

int print_findings(const Diagnosis& diagnosis) {
  int problems = 0;
  std::string section;
  for (const Finding& finding : diagnosis.findings) {
    const bool is_new = finding.section != section;
    section = finding.section;
    print("{} {} {}\n", paint(Color::kBold, format("{:<10}", is_new ? section : "")), mark_of(finding.health),
          finding.text);
    if (!finding.cure.empty()) print("{:<12} {} {}\n", "", paint(Color::kBold, "fix:"), finding.cure);
    problems += finding.health == Health::kProblem;
  }
  return problems;
}

void print_block(const Diagnosis& diagnosis) {
  print("\nTo paste into an issue:\n```\n");
  for (const Finding& finding : diagnosis.findings) {
    const char* prefix = finding.health == Health::kProblem ? "PROBLEM: " : "";
    print("{}: {}{}\n", finding.section, prefix, finding.text);
  }
  print("```\n");
}

int examine(const DoctorArguments& arguments) {
  const Diagnosis diagnosis = diagnose(!arguments.no_self_test, arguments.python_seconds);
  const int exit_code = diagnosis.self_tests_passed() ? kSuccess : kFailure;
  if (arguments.json) {
    print_text(diagnosis_json(diagnosis));
    return exit_code;
  }
  const int problems = print_findings(diagnosis);
  print("\n{}\n", problems == 0 ? paint(Color::kGreen, "no problems found")
                                : paint(Color::kRed, format("{} problem{}; each fix is one command", problems,
                                                            problems == 1 ? "" : "s")));
  print_block(diagnosis);
  return exit_code;
}

}  // namespace

void add_doctor(Command root) {
  auto arguments = std::make_shared<DoctorArguments>();
  root.subcommand("doctor", "Look at this machine, test it, and say what to fix")
      .flag("--json", arguments->json, "as JSON")
      .flag("--no-self-test", arguments->no_self_test, "only look, run no kernel")
      .number("--python-seconds", arguments->python_seconds, "limit for Python's part (torch, jax); 0: leave it out", 0,
              3600)
      .runs([arguments] { return examine(*arguments); });
}

}  // namespace kernel_pytorch::cli
