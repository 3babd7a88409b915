// kpt bench: the chosen kernel (or, with --all, every kernel and config) against a copy of the same bytes, in one run.
// --save keeps the samples, --compare tells whether two files of them differ.
#include <algorithm>

#include "kernel_pytorch/base/error.h"
#include "kernel_pytorch/cli/bench_samples.h"
#include "kernel_pytorch/cli/command.h"
#include "kernel_pytorch/cli/format.h"
#include "kernel_pytorch/cli/json_output.h"
#include "kernel_pytorch/cli/problem_arguments.h"
#include "kernel_pytorch/cli/terminal.h"

namespace kernel_pytorch::cli {
namespace {

struct BenchArguments {
  ProblemArguments problem;
  bool every_kernel = false;
  double seconds_each = 0.2;
  std::string save_path;
  CompareArguments compare;  // its json is this command's
};

// A matrix larger than the caches. An op that takes no matrix is measured on the largest of its own shapes.
std::vector<NamedProblem> usual_problems(const registry::AnyOperation& operation, const BenchArguments& arguments) {
  const bool is_cpu = named_device(arguments.problem.device).kind == DeviceKind::kCpu;
  ProblemArguments usual = arguments.problem;
  usual.op = operation.name;
  usual.shapes = is_cpu ? std::vector<std::string>{"1024x4096"} : std::vector<std::string>{"16384x4096", "8192x8192"};
  if (usual.dtypes.empty()) usual.dtypes = {"fp32", "bf16"};
  try {
    return named_problems(usual);
  } catch (const UsageError&) {
    if (!arguments.problem.dtypes.empty() || !arguments.problem.options.empty()) throw;
  }
  std::vector<registry::ProblemRequest> own = operation.shapes();
  const auto largest = std::max_element(
      own.begin(), own.end(), [](const auto& a, const auto& b) { return element_count(a) < element_count(b); });
  if (largest == own.end()) return {};
  largest->device = named_device(arguments.problem.device);
  return {{&operation, *largest}};
}

std::vector<NamedProblem> problems_of(const BenchArguments& arguments) {
  if (!arguments.problem.shapes.empty()) return named_problems(arguments.problem);
  std::vector<NamedProblem> problems;
  for (const registry::AnyOperation* operation : named_operations(arguments.problem.op)) {
    for (NamedProblem& problem : usual_problems(*operation, arguments)) problems.push_back(std::move(problem));
  }
  return problems;
}

// "1", or "1 and 2 fills".
std::string launches_text(const registry::BenchRow& row) {
  if (row.fills == 0) return std::to_string(row.launches);
  return format("{} and {} fill{}", row.launches, row.fills, row.fills == 1 ? "" : "s");
}

void add_rows(Table& table, const NamedProblem& problem, const registry::BenchReport& report) {
  const bool is_gpu = problem.request.device.kind == DeviceKind::kCuda;
  std::string op = problem.operation->name, words = request_text(problem.request);
  for (const registry::BenchRow& row : report.rows) {
    std::vector<Cell> cells{
        op,
        words,
        row.kernel,
        row.config,
        std::string(name_of(row.tier)),
        microseconds_text(row.median_us),
        "±" + microseconds_text(row.spread_us),
        format("{:.1f}", row.gigabytes_per_second),
        {format("{:.0f} %", 100 * row.roof_share), row.roof_share >= 0.9 ? Color::kGreen : Color::kPlain}};
    if (is_gpu) cells.push_back(launches_text(row));
    table.add(std::move(cells));
    op = words = "";
  }
}

int bench(const BenchArguments& arguments) {
  if (!arguments.compare.files.empty()) {
    if (!arguments.problem.op.empty() || !arguments.save_path.empty())
      throw UsageError("bench: --compare measures nothing, so no op and no --save go with it");
    return compare_samples(arguments.compare);
  }
  if (!arguments.save_path.empty()) check_samples_file(arguments.save_path);
  const std::vector<NamedProblem> problems = problems_of(arguments);
  std::vector<registry::BenchReport> reports;
  std::vector<std::string> headings{"OP",      "PROBLEM", "KERNEL", "CONFIG",    "TIER",
                                    ">MEDIAN", ">SPREAD", ">GB/S",  ">OF A COPY"};
  if (named_device(arguments.problem.device).kind == DeviceKind::kCuda) headings.push_back(">LAUNCHES");
  Table table(std::move(headings));
  {
    ProgressLine line;
    int done = 0;
    for (const NamedProblem& problem : problems) {
      line.show("bench", done++, static_cast<int>(problems.size()), problem_text(problem));
      reports.push_back(problem.operation->bench(problem.request, arguments.every_kernel, arguments.seconds_each));
      add_rows(table, problem, reports.back());
    }
  }
  if (!arguments.save_path.empty()) save_samples(arguments.save_path, problems, reports);
  if (arguments.compare.json) {
    print_text(benchmarks_json(reports));
    return kSuccess;
  }
  const DeviceInfo& device = device_info(named_device(arguments.problem.device));
  print("{} ({})\n{}", to_string(device.device), device.name, table.text());
  return kSuccess;
}

}  // namespace

void add_bench(Command root) {
  Command command = root.subcommand("bench", "Time kernels against a copy of the same bytes");
  auto arguments = std::make_shared<BenchArguments>();
  add_problem_arguments(command, arguments->problem, Need::kOptional);
  command.also_called("benchmark")
      .flag("--all,-a", arguments->every_kernel, "every supported kernel with every config, not the chosen one alone")
      .number("--seconds", arguments->seconds_each, "of measuring for each row", 0, 3600)
      .text("--save", arguments->save_path, "add the samples to this file, as one run")
      .text_pair("--compare", arguments->compare.files,
                 "measure nothing: tell what changed between two files; exit code 1 where something is slower")
      .number("--threshold", arguments->compare.threshold_percent, "percent; smaller changes are none", 0, 1e6)
      .number("--significance", arguments->compare.significance, "chance of a false alarm, of all series together", 0,
              1)
      .flag("--json", arguments->compare.json, "as JSON")
      .runs([arguments] { return bench(*arguments); });
}

}  // namespace kernel_pytorch::cli
