#include "kernel_pytorch/cli/bench_samples.h"

#include <unistd.h>

#include "kernel_pytorch/base/error.h"
#include "kernel_pytorch/c/kernel_pytorch.h"
#include "kernel_pytorch/c/sample_file.h"
#include "kernel_pytorch/cli/command.h"
#include "kernel_pytorch/cli/files.h"
#include "kernel_pytorch/cli/format.h"
#include "kernel_pytorch/cli/json_output.h"
#include "kernel_pytorch/cli/terminal.h"

namespace kernel_pytorch::cli {
namespace {

using c_interface::SampleComparison;
using c_interface::SampleRun;
using tuning::Change;

std::vector<SampleRun> read_samples(const std::string& path) {
  return c_interface::sample_runs_from(read_file(path, static_cast<int64_t>(c_interface::kMaxSampleFileBytes)), path);
}

// The chosen kernel goes by its problem, so that a better choice is compared with the one before it; a row that was
// asked for by --all goes by its kernel too.
std::vector<c_interface::NamedSamples> series_of(const NamedProblem& problem, const registry::BenchReport& report) {
  std::vector<c_interface::NamedSamples> series;
  const std::string name = problem.operation->name + " " + request_text(problem.request);
  for (const registry::BenchRow& row : report.rows) {
    const std::string kernel = row.config.empty() ? row.kernel : row.kernel + " " + row.config;
    const bool is_chosen = &row == &report.rows.front();
    series.push_back({is_chosen ? name : name + ", " + kernel, kernel, {row.samples_us, report.copy_samples_us}});
  }
  return series;
}

Cell verdict_of(const tuning::SeriesChange& change) {
  switch (change.change) {
    case Change::kSlower:
      return {"slower", Color::kRed};
    case Change::kFaster:
      return {"faster", Color::kGreen};
    case Change::kMachine:
      return {"as the copy did: the machine", Color::kYellow};
    case Change::kTooFew:
      return {"too few samples", Color::kYellow};
    case Change::kNone:
      break;
  }
  return {"no clear change", Color::kDim};
}

Table table_of(const SampleComparison& comparison) {
  Table table({"SERIES", ">BEFORE", ">AFTER", ">RATIO", ">COPY", ">P", "CHANGE", "KERNEL"});
  for (size_t i = 0; i < comparison.changes.size(); ++i) {
    const tuning::SeriesChange& change = comparison.changes[i];
    table.add({change.name, microseconds_text(change.before_us), microseconds_text(change.after_us),
               format("{:.3f}", change.ratio),
               change.control_ratio > 0 ? format("{:.3f}", change.control_ratio) : std::string("-"),
               change.p < 1e-4 ? std::string("< 1e-4") : format("{:.4f}", change.p), verdict_of(change),
               comparison.kernels[i]});
  }
  return table;
}

void print_missing(const std::vector<std::string>& names, const std::string& path) {
  for (const std::string& name : names) print("  only in {}: {}\n", path, name);
}

}  // namespace

void check_samples_file(const std::string& path) {
  if (access(path.c_str(), F_OK) == 0) read_samples(path);
}

void save_samples(const std::string& path, const std::vector<NamedProblem>& problems,
                  const std::vector<registry::BenchReport>& reports) {
  if (problems.empty()) throw UsageError("bench: nothing was measured, so there is nothing to save");
  const DeviceInfo& device = device_info(problems.front().request.device);
  SampleRun run{"", device.name, device.fingerprint, kp_version(), {}};
  for (size_t i = 0; i < reports.size(); ++i) {
    for (c_interface::NamedSamples& series : series_of(problems[i], reports[i]))
      run.series.push_back(std::move(series));
  }
  std::vector<SampleRun> runs;
  if (access(path.c_str(), F_OK) == 0) runs = read_samples(path);
  KP_CHECK(runs.empty() || runs.front().fingerprint == device.fingerprint, path, ": its runs are of ",
           runs.front().device, ", this one is of ", device.name, "; name another file");
  runs.push_back(std::move(run));
  write_file(path, c_interface::sample_file_text(runs));
}

int compare_samples(const CompareArguments& arguments) {
  const std::vector<SampleRun> before = read_samples(arguments.files.at(0)),
                               after = read_samples(arguments.files.at(1));
  const SampleComparison comparison =
      c_interface::compare_runs(before, after, {arguments.threshold_percent / 100, arguments.significance});
  if (arguments.json) {
    print_text(comparison_json(comparison));
  } else {
    print("{} ({} and {} runs)\n{}", before.front().device, before.size(), after.size(), table_of(comparison).text());
    print_missing(comparison.only_before, arguments.files.at(0));
    print_missing(comparison.only_after, arguments.files.at(1));
    print("{} slower, {} faster by more than {:g} %, {} compared\n", comparison.count(Change::kSlower),
          comparison.count(Change::kFaster), arguments.threshold_percent, comparison.changes.size());
  }
  if (comparison.changes.empty()) throw UsageError("bench: no series is in both files, so nothing was compared");
  return comparison.count(Change::kSlower) > 0 ? kFailure : kSuccess;
}

}  // namespace kernel_pytorch::cli
