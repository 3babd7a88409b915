// Which problems of a model's step are worth tuning, and for how long: those with a choice between kernels that take
// enough of the step, the largest share first, while the budget lasts. Shares are predicted from the least work of each
// problem against the roofs measured on this machine.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "kernel_pytorch/base/export.h"
#include "kernel_pytorch/plan/optimize/model_plan.h"

namespace kernel_pytorch::plan {

struct TunableProblem {
  std::string op, problem;
  int64_t calls = 1;            // in one step
  int64_t candidates = 0;       // kernels and configs that could run it
  double bytes = 0, flops = 0;  // of one call, at least
  bool decided = false;         // by hand, or by a measurement
};

struct TuningDecision {
  int64_t problem = 0;  // index into the problems
  bool tunes = false;
  bool listed = false;  // its share is worth a word in a report
  double share = 0;     // of the step, at most 1
  double seconds = 0;   // to spend on it
  std::string reason;
};

// `step_us` is the measured time of one step. Decisions are in the order of the problems.
KP_EXPORT std::vector<TuningDecision> plan_tuning(const std::vector<TunableProblem>& problems, const Machine& machine,
                                                  double step_us, double budget_seconds);

}  // namespace kernel_pytorch::plan
