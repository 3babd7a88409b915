#include "kernel_pytorch/plan/optimize/budget_plan.h"

#include <gtest/gtest.h>

#include "kernel_pytorch/base/error.h"

namespace kernel_pytorch::plan {
namespace {

StageBudget stage(const BudgetPlan& plan, Stage stage) {
  return plan.stages[static_cast<size_t>(stage)];
}

TEST(BudgetPlan, KeepsBackWhatTheEndNeeds) {
  const BudgetPlan plan = plan_budget({.seconds = 10, .step_seconds = 0.5});
  EXPECT_FALSE(plan.is_too_small);
  EXPECT_DOUBLE_EQ(plan.final_seconds, 8);
  EXPECT_DOUBLE_EQ(stage(plan, Stage::kParts).until_seconds, 5.5);
  EXPECT_DOUBLE_EQ(plan.most_seconds, 15);
  EXPECT_DOUBLE_EQ(stage(plan, Stage::kWhole).until_seconds, 7) << "of 15 the end keeps 8";
}

TEST(BudgetPlan, IsTooSmallWhereTheEndDoesNotFit) {
  EXPECT_TRUE(plan_budget({.seconds = 10, .step_seconds = 1}).is_too_small);
  EXPECT_DOUBLE_EQ(plan_budget({.seconds = 10, .step_seconds = 1}).enough_seconds, 32);
  EXPECT_FALSE(plan_budget({.seconds = 10, .step_seconds = 15.0 / 16}).is_too_small);
}

TEST(BudgetPlan, StagesBeginInOrder) {
  const BudgetPlan plan = plan_budget({.seconds = 60, .step_seconds = 0.01});
  double last = 0;
  for (Stage one : {Stage::kFind, Stage::kCount, Stage::kParts, Stage::kLater, Stage::kTogether, Stage::kTune,
                    Stage::kLast, Stage::kWhole}) {
    EXPECT_GT(stage(plan, one).until_seconds, last);
    last = stage(plan, one).until_seconds;
  }
}

TEST(BudgetPlan, MeasurementsTakeSharesWithinLimits) {
  const BudgetPlan small = plan_budget({.seconds = 10, .step_seconds = 0, .passed_seconds = 4});
  EXPECT_DOUBLE_EQ(stage(small, Stage::kTogether).measure_seconds, 1);
  EXPECT_DOUBLE_EQ(stage(small, Stage::kCompiled).measure_seconds, 3);
  EXPECT_DOUBLE_EQ(stage(small, Stage::kTune).measure_seconds, 0.3 * 6);
  EXPECT_DOUBLE_EQ(stage(small, Stage::kTuned).measure_seconds, 0.1 * 6);
  EXPECT_DOUBLE_EQ(stage(small, Stage::kWhole).measure_seconds, 0.6 * 6);
  EXPECT_DOUBLE_EQ(stage(small, Stage::kOptimizer).measure_seconds, 0.5);
  const BudgetPlan large = plan_budget({.seconds = 100, .step_seconds = 0, .passed_seconds = 1000});
  EXPECT_DOUBLE_EQ(stage(large, Stage::kTogether).measure_seconds, 3);
  EXPECT_DOUBLE_EQ(stage(large, Stage::kOptimizer).measure_seconds, 2);
  EXPECT_DOUBLE_EQ(stage(large, Stage::kCompiled).measure_seconds, 1) << "at least one second, however late it is";
  EXPECT_DOUBLE_EQ(stage(large, Stage::kTune).measure_seconds, 0) << "nothing is left";
}

TEST(BudgetPlan, RefusesNumbersThatAreNone) {
  EXPECT_THROW(plan_budget({.seconds = 0}), Error);
  EXPECT_THROW(plan_budget({.seconds = 1, .step_seconds = -1}), Error);
}

}  // namespace
}  // namespace kernel_pytorch::plan
