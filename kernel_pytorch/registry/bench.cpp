#include "kernel_pytorch/registry/bench.h"

#include <algorithm>

#include "kernel_pytorch/device/cuda/launch_counts.h"
#include "kernel_pytorch/registry/copy_roof.h"
#include "kernel_pytorch/registry/slow_path.h"
#include "kernel_pytorch/registry/trial.h"
#include "kernel_pytorch/tuning/autotuner.h"

namespace kernel_pytorch::registry {
namespace {

struct Runner {
  int kernel = 0;
  int config = 0;
  BenchRow row;
};

std::vector<Runner> list_runners(const AnyProblem& problem, const Selected& chosen, bool every_kernel) {
  std::vector<Runner> runners;
  for (int kernel = 0; kernel < problem.kernel_count(); ++kernel) {
    if (!problem.supports(kernel)) continue;
    const std::vector<std::string> configs = problem.configs(kernel);
    for (int config = 0; config < static_cast<int>(configs.size()); ++config) {
      const bool is_chosen = kernel == chosen.kernel && config == chosen.config;
      if (!is_chosen && !every_kernel) continue;
      Runner runner{kernel, config, {}};
      runner.row.kernel = problem.kernel_name(kernel);
      runner.row.config = configs[static_cast<size_t>(config)];
      // A row that was not chosen is there because it was named.
      runner.row.tier = is_chosen ? chosen.tier : tuning::Tier::kOverride;
      runners.insert(is_chosen ? runners.begin() : runners.end(), std::move(runner));
    }
  }
  return runners;
}

// What the driver is given in one run of each kernel; the run before it has compiled and loaded what there is to load.
void count_launches(std::vector<Runner>& runners, const AnyProblem& problem, TrialContext& trial) {
  for (Runner& runner : runners) {
    trial.run(problem, runner.kernel, runner.config);
    const cuda_device::LaunchCounts before = cuda_device::launch_counts();
    trial.run(problem, runner.kernel, runner.config);
    const cuda_device::LaunchCounts counted = cuda_device::launch_counts() - before;
    runner.row.launches = counted.kernels;
    runner.row.fills = counted.fills;
  }
}

}  // namespace

BenchReport bench(const AnyProblem& problem, bool every_kernel, double seconds_each) {
  OwnContext own(problem.device().device);
  TrialContext trial(own);
  const Selected chosen = select(problem, own);
  std::vector<Runner> runners = list_runners(problem, chosen, every_kernel);
  const RotatedProblem rotated(problem, trial.context());
  BenchReport report;
  report.op = problem.op();
  report.device = problem.device().name;
  report.cost = problem.cost();
  if (problem.device().device.kind == DeviceKind::kCuda) count_launches(runners, rotated.at(0), trial);
  const CopyRoof roof(report.cost.bytes, rotated.rotations(), trial.context());

  std::vector<tuning::Candidate> candidates;
  for (const Runner& runner : runners) {
    candidates.push_back(
        {runner.row.kernel,
         runner.row.config,
         [&rotated, &trial, &runner](int rotation) { trial.run(rotated.at(rotation), runner.kernel, runner.config); },
         {}});
  }
  for (tuning::Candidate& copy : roof.candidates()) candidates.push_back(std::move(copy));
  std::vector<tuning::Timing> timings =
      tuning::time_interleaved(candidates, trial.context(), seconds_each, rotated.rotations());

  tuning::Timing& copy =
      *std::min_element(timings.begin() + static_cast<ptrdiff_t>(runners.size()), timings.end(),
                        [](const tuning::Timing& a, const tuning::Timing& b) { return a.median_us < b.median_us; });
  report.copy_us = copy.median_us;
  report.copy_samples_us = std::move(copy.samples_us);
  for (size_t i = 0; i < runners.size(); ++i) {
    BenchRow& row = runners[i].row;
    row.median_us = timings[i].median_us;
    row.spread_us = timings[i].spread_us;
    row.gigabytes_per_second = static_cast<double>(report.cost.bytes) / row.median_us / 1e3;
    row.roof_share = report.copy_us / row.median_us;
    row.samples_us = std::move(timings[i].samples_us);
    report.rows.push_back(std::move(row));
  }
  return report;
}

}  // namespace kernel_pytorch::registry
