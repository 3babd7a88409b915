#include "kernel_pytorch/plan/optimize/budget_plan.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "kernel_pytorch/base/error.h"

namespace kernel_pytorch::plan {
namespace {

constexpr double kMost = 1.5;   // times the seconds, of the whole call
constexpr int kFinalRuns = 16;  // verified against the original (4), timed in turns (8), profiled (4)
constexpr double kEnough = 2;   // times the final runs, to ask for
constexpr double kNoLimit = std::numeric_limits<double>::infinity();

// A stage begins while less than `until` of the seconds has passed. A measurement takes a share of the seconds or of
// what is left of them, within limits.
struct StageRule {
  double until = 1;
  double of_budget = 0, of_left = 0;
  double least_seconds = 0, most_seconds = kNoLimit;
};

constexpr std::array<StageRule, kStageNames.size()> kRules = {{
    {.until = 0.3},                                         // find: patterns look for parts
    {.until = 0.4},                                         // count: the work of each part
    {.until = 0.55},                                        // parts: the model plan says how long each is measured
    {.until = 0.7},                                         // later: parts that are looked for when those are in force
    {.until = 0.79, .of_budget = 0.1, .most_seconds = 3},   // together: small gains
    {.until = 1, .of_left = 0.5, .least_seconds = 1},       // compiled: sets of replacements
    {.until = 0.83, .of_left = 0.3},                        // tune: kernels of the step
    {.until = 0.83, .of_left = 0.1, .least_seconds = 0.2},  // tuned: the whole with them and without
    {.until = 0.92, .of_budget = 0.1, .most_seconds = 3},   // last: graphs; and parts whose calls take longer
    {.until = 1, .of_left = 0.6},                           // whole: timed; the rest is for memory and kernels
    {.until = 1, .of_budget = 0.05, .most_seconds = 2},     // optimizer: its step
}};

}  // namespace

BudgetPlan plan_budget(const BudgetRequest& request) {
  KP_CHECK(request.seconds > 0 && std::isfinite(request.seconds), "budget plan: the budget is ", request.seconds,
           " s; it must be positive");
  KP_CHECK(request.step_seconds >= 0 && std::isfinite(request.step_seconds) && request.passed_seconds >= 0,
           "budget plan: one run takes ", request.step_seconds, " s and ", request.passed_seconds,
           " s have passed; neither may be negative");
  BudgetPlan plan{.final_runs = kFinalRuns, .final_seconds = kFinalRuns * request.step_seconds};
  plan.is_too_small = plan.final_seconds > kMost * request.seconds;
  plan.enough_seconds = kEnough * plan.final_seconds;
  plan.most_seconds = kMost * request.seconds;
  const double free_seconds = kMost * request.seconds - plan.final_seconds;
  const double left = std::max(std::min(request.seconds, free_seconds) - request.passed_seconds, 0.0);
  for (size_t i = 0; i < kRules.size(); ++i) {
    const StageRule& rule = kRules[i];
    plan.stages[i].until_seconds = std::min(rule.until * request.seconds, free_seconds);
    const double wanted = rule.of_budget * request.seconds + rule.of_left * left;
    plan.stages[i].measure_seconds = std::clamp(wanted, rule.least_seconds, rule.most_seconds);
  }
  return plan;
}

}  // namespace kernel_pytorch::plan
