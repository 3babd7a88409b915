#include "kernel_pytorch/plan/optimize/tuning_plan.h"

#include <algorithm>
#include <cmath>
#include <iomanip>
#include <numeric>
#include <sstream>

#include "kernel_pytorch/base/error.h"

namespace kernel_pytorch::plan {
namespace {

constexpr double kLeastShare = 0.02;                                  // a tenth of less cannot be seen in a step
constexpr double kMostForOneProblem = 10;                             // for one problem
constexpr double kSetUpSeconds = 0.02, kSetUpBytesPerSecond = 0.5e9;  // buffers, filled with random numbers
constexpr double kCpuCheckSeconds = 0.02, kCudaCheckSeconds = 0.4;    // of a candidate; on a GPU it is compiled too
constexpr double kRuns = 17, kLeastRunUs = 200;                       // of a candidate, each of at least this long

std::string fixed(double value, int digits) {
  std::ostringstream text;
  text << std::fixed << std::setprecision(digits) << value;
  return text.str();
}

std::string share_text(double share) {
  return concat(fixed(100 * share, share < 0.1 ? 1 : 0), " %");
}

double call_us(const TunableProblem& problem, const Machine& machine) {
  const bool computes = problem.flops / machine.flops_per_second > problem.bytes / machine.bytes_per_second;
  return predicted_us({.bytes = computes ? 0 : problem.bytes, .flops = computes ? problem.flops : 0, .launches = 1},
                      machine);
}

double seconds_for(const TunableProblem& problem, double candidates, const Machine& machine) {
  const double check = machine.is_cuda ? kCudaCheckSeconds : kCpuCheckSeconds;
  const double runs = kRuns * std::max(call_us(problem, machine), kLeastRunUs) / 1e6;
  return kSetUpSeconds + problem.bytes / kSetUpBytesPerSecond + candidates * (check + runs);
}

void check(const TunableProblem& problem) {
  KP_CHECK(problem.calls >= 0 && problem.candidates >= 0 && problem.bytes >= 0 && problem.flops >= 0 &&
               std::isfinite(problem.bytes) && std::isfinite(problem.flops),
           "tuning plan: ", problem.op, " (", problem.problem, ") has ", problem.calls, " calls of ", problem.bytes,
           " bytes and ", problem.flops, " operations and ", problem.candidates, " candidates; all are 0 or more");
}

TuningDecision consider(const TunableProblem& problem, const Machine& machine, double step_us) {
  TuningDecision decision;
  decision.share = std::min(1.0, static_cast<double>(problem.calls) * call_us(problem, machine) / step_us);
  decision.listed = decision.share >= kLeastShare && problem.candidates > 1;
  if (problem.candidates < 2) {
    decision.reason = "nothing to choose: one kernel with one config takes it";
  } else if (!decision.listed) {
    decision.reason = concat("it takes about ", share_text(decision.share), " of the step; from ",
                             share_text(kLeastShare), " on it pays");
  } else if (problem.decided) {
    decision.reason = "chosen before, by a measurement or by hand";
  } else {
    decision.tunes = true;
  }
  return decision;
}

}  // namespace

std::vector<TuningDecision> plan_tuning(const std::vector<TunableProblem>& problems, const Machine& machine,
                                        double step_us, double budget_seconds) {
  KP_CHECK(machine.bytes_per_second > 0 && machine.flops_per_second > 0, "tuning plan: the machine moves ",
           machine.bytes_per_second, " bytes and computes ", machine.flops_per_second,
           " operations in a second; both must be positive");
  KP_CHECK(step_us > 0 && budget_seconds >= 0, "tuning plan: a step of ", step_us, " us and a budget of ",
           budget_seconds, " s; the step must be positive, the budget 0 or more");
  std::vector<TuningDecision> decisions;
  for (size_t i = 0; i < problems.size(); ++i) {
    check(problems[i]);
    decisions.push_back(consider(problems[i], machine, step_us));
    decisions.back().problem = static_cast<int64_t>(i);
  }
  std::vector<size_t> order(problems.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::stable_sort(order.begin(), order.end(),
                   [&](size_t a, size_t b) { return decisions[a].share > decisions[b].share; });
  double left = budget_seconds;
  for (const size_t place : order) {
    TuningDecision& decision = decisions[place];
    if (!decision.tunes) continue;
    const TunableProblem& problem = problems[place];
    const double wanted =
        std::min(seconds_for(problem, static_cast<double>(problem.candidates), machine), kMostForOneProblem);
    const double least = std::min(seconds_for(problem, 2, machine), wanted);
    decision.tunes = left >= least;
    const std::string work = concat("about ", share_text(decision.share), " of the step, ", problem.candidates,
                                    " candidates, some ", fixed(wanted, 1), " s");
    if (!decision.tunes) {
      decision.reason = concat("no time left in the budget: ", work, ", of which ", fixed(left, 1), " s were left");
      continue;
    }
    decision.seconds = std::min(wanted, left);
    left -= decision.seconds;
    decision.reason = work;
  }
  return decisions;
}

}  // namespace kernel_pytorch::plan
