// How the seconds of one call of `optimize` are shared among its stages. The whole call takes at most 1.5 times the
// seconds; what verifying and measuring the whole needs at the end is kept back, so that a stage begins only while the
// end still fits.
#pragma once

#include <array>
#include <string_view>

#include "kernel_pytorch/base/export.h"

namespace kernel_pytorch::plan {

// In the order of a call.
enum class Stage { kFind, kCount, kParts, kLater, kTogether, kCompiled, kTune, kTuned, kLast, kWhole, kOptimizer };
inline constexpr std::array<std::string_view, 11> kStageNames = {
    "find", "count", "parts", "later", "together", "compiled", "tune", "tuned", "last", "whole", "optimizer"};

struct BudgetRequest {
  double seconds = 0;         // that the caller gave
  double step_seconds = 0;    // of one run of the model
  double passed_seconds = 0;  // since the call began
};

struct StageBudget {
  double until_seconds = 0;    // after the beginning: nothing of the stage starts later
  double measure_seconds = 0;  // for one measurement of the stage that starts now
};

struct BudgetPlan {
  bool is_too_small = false;  // not even the end fits: nothing is tried and nothing measured
  int final_runs = 0;         // of the model, at the end
  double final_seconds = 0;   // of these runs
  double enough_seconds = 0;  // to ask for where it is too small
  double most_seconds = 0;    // of the whole call: what may be left out ends before
  std::array<StageBudget, kStageNames.size()> stages{};
};

KP_EXPORT BudgetPlan plan_budget(const BudgetRequest& request);

}  // namespace kernel_pytorch::plan
