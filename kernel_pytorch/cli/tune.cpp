// kpt tune: measures every kernel and config for a problem and remembers the fastest. Ctrl-C keeps what was measured.

#include <algorithm>
#include <cstdio>

#include "kernel_pytorch/cli/command.h"
#include "kernel_pytorch/cli/format.h"
#include "kernel_pytorch/cli/interrupt.h"
#include "kernel_pytorch/cli/json_output.h"
#include "kernel_pytorch/cli/problem_arguments.h"
#include "kernel_pytorch/cli/terminal.h"
#include "kernel_pytorch/tuning/store.h"

namespace kernel_pytorch::cli {
namespace {

constexpr size_t kRowsShown = 8;

struct TuneArguments {
  ProblemArguments problem;
  double budget_seconds = 10;
  bool json = false;
};

tuning::TuneReport tune_with_progress(const NamedProblem& problem, double budget_seconds) {
  ProgressLine line;
  tuning::TuneOptions options;
  options.budget_seconds = budget_seconds;
  options.interrupted = [] { return InterruptGuard::interrupted(); };
  options.progress = [&](const tuning::TuneProgress& progress) {
    const std::string best = progress.best_us > 0
                                 ? format("best {} {}", progress.best, microseconds_text(progress.best_us))
                                 : progress.candidate;
    line.show(problem.operation->name, progress.done, progress.total, best,
              std::max(0.0, budget_seconds - line.seconds()));
  };
  return problem.operation->tune(problem.request, options);
}

void print_report(const NamedProblem& problem, const tuning::TuneReport& report) {
  print("{}\n", paint(Color::kBold, problem_text(problem)));
  Table table({"", "KERNEL", "CONFIG", ">MEDIAN", ">SPREAD", ">AGAINST BEST"});
  size_t shown = 0;
  for (const tuning::TuneRow& row : report.rows) {
    if (!row.failure.empty()) {
      table.add({{"✗", Color::kRed}, row.kernel, row.config, "", "", {row.failure, Color::kRed}});
    } else if (shown++ < kRowsShown) {
      const bool is_best = shown == 1;
      table.add({is_best ? Cell("→", Color::kGreen) : Cell(""), row.kernel, row.config,
                 microseconds_text(row.median_us), "±" + microseconds_text(row.spread_us),
                 format("{:.2f}x", row.median_us / report.rows.front().median_us)});
    }
  }
  print("{}", table.text());
  if (shown > kRowsShown) print("  and {} slower\n", shown - kRowsShown);
  const char* outcome = shown == 0                                ? "nothing to remember"
                        : tuning::store_info().outlives_process() ? "the winner is remembered"
                                                                  : "the winner is forgotten when this process ends";
  print("  {} in {:.1f} s; {}\n\n", report.complete ? "every candidate measured" : "stopped before the end",
        report.seconds, outcome);
  std::fflush(stdout);  // whoever reads along sees each problem when it is done
}

int tune(const TuneArguments& arguments) {
  const std::vector<NamedProblem> problems = named_problems(arguments.problem);
  const InterruptGuard guard;
  std::vector<tuning::TuneReport> reports;
  int exit_code = kSuccess;
  for (const NamedProblem& problem : problems) {
    reports.push_back(tune_with_progress(problem, arguments.budget_seconds));
    if (!arguments.json) print_report(problem, reports.back());
    for (const tuning::TuneRow& row : reports.back().rows) {
      if (!row.failure.empty()) exit_code = kFailure;
    }
    if (InterruptGuard::interrupted()) break;
  }
  if (arguments.json) {
    print_text(tuning_json(reports));
  } else {
    const tuning::StoreInfo store = tuning::store_info();
    print("store: {} ({})\n", store.path, store.state);
  }
  return InterruptGuard::interrupted() ? kInterrupted : exit_code;
}

}  // namespace

void add_tune(Command root) {
  Command command = root.subcommand("tune", "Measure every kernel and config for a problem; remember the fastest");
  auto arguments = std::make_shared<TuneArguments>();
  add_problem_arguments(command, arguments->problem, Need::kRequired);
  command.number("--budget,-b", arguments->budget_seconds, "seconds for each problem", 0, 1e6)
      .flag("--json", arguments->json, "as JSON")
      .footer("Ctrl-C stops and keeps what was measured.")
      .runs([arguments] { return tune(*arguments); });
}

}  // namespace kernel_pytorch::cli
