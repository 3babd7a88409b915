// kpt tune: measures every kernel and config for a problem and remembers the fastest. Ctrl-C keeps what was measured.
#include <fmt/format.h>

#include "kernel_pytorch/c/report.h"
#include "kernel_pytorch/cli/command.h"
#include "kernel_pytorch/cli/interrupt.h"
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
                                 ? fmt::format("best {} {}", progress.best, microseconds_text(progress.best_us))
                                 : progress.candidate;
    line.show(problem.operation->name, progress.done, progress.total, best,
              std::max(0.0, budget_seconds - line.seconds()));
  };
  return problem.operation->tune(problem.request, options);
}

void print_report(const NamedProblem& problem, const tuning::TuneReport& report) {
  fmt::print("{}\n", paint(Color::kBold, problem_text(problem)));
  Table table({"", "KERNEL", "CONFIG", ">MEDIAN", ">SPREAD", ">AGAINST BEST"});
  size_t shown = 0;
  for (const tuning::TuneRow& row : report.rows) {
    if (!row.failure.empty()) {
      table.add({{"✗", Color::kRed}, row.kernel, row.config, "", "", {row.failure, Color::kRed}});
    } else if (shown++ < kRowsShown) {
      const bool is_best = shown == 1;
      table.add({is_best ? Cell("→", Color::kGreen) : Cell(""), row.kernel, row.config,
                 microseconds_text(row.median_us), "±" + microseconds_text(row.spread_us),
                 fmt::format("{:.2f}x", row.median_us / report.rows.front().median_us)});
    }
  }
  fmt::print("{}", table.text());
  if (shown > kRowsShown) fmt::print("  and {} slower\n", shown - kRowsShown);
  fmt::print("  {} in {:.1f} s; {}\n\n", report.complete ? "every candidate measured" : "stopped before the end",
             report.seconds, shown == 0 ? "nothing to remember" : "the winner is remembered");
}

int tune(const TuneArguments& arguments) {
  const std::vector<NamedProblem> problems = named_problems(arguments.problem);
  const InterruptGuard guard;
  c_interface::Json all = c_interface::Json::array();
  int exit_code = kSuccess;
  for (const NamedProblem& problem : problems) {
    const tuning::TuneReport report = tune_with_progress(problem, arguments.budget_seconds);
    if (arguments.json) {
      all.push_back(c_interface::report(report));
    } else {
      print_report(problem, report);
    }
    for (const tuning::TuneRow& row : report.rows) {
      if (!row.failure.empty()) exit_code = kFailure;
    }
    if (InterruptGuard::interrupted()) break;
  }
  const tuning::StoreInfo store = tuning::store_info();
  if (arguments.json) {
    print_line(c_interface::to_text({{"reports", all}, {"store", c_interface::report(store)}}, 2));
  } else {
    fmt::print("store: {} ({})\n", store.path, store.state);
  }
  return InterruptGuard::interrupted() ? kInterrupted : exit_code;
}

}  // namespace

void add_tune(CLI::App& app, Run& run) {
  CLI::App* command = app.add_subcommand("tune", "Measure every kernel and config for a problem; remember the fastest");
  auto arguments = std::make_shared<TuneArguments>();
  add_problem_arguments(*command, arguments->problem, Demand::kOpAndShape);
  command->add_option("--budget,-b", arguments->budget_seconds, "seconds for each problem")
      ->capture_default_str()
      ->check(CLI::Range(0.0, 1e6));
  command->add_flag("--json", arguments->json, "as JSON");
  command->footer("Ctrl-C stops and keeps what was measured.");
  command->callback([&run, arguments] { run = [arguments] { return tune(*arguments); }; });
}

}  // namespace kernel_pytorch::cli
