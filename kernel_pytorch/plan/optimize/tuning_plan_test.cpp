// The plan of tuning by hand-made numbers: what pays, in which order the budget goes, and what is said of the rest.
#include "kernel_pytorch/plan/optimize/tuning_plan.h"

#include <gtest/gtest.h>

#include "kernel_pytorch/base/error.h"

namespace kernel_pytorch::plan {
namespace {

constexpr Machine kTuningGpu{.bytes_per_second = 4e12, .flops_per_second = 700e12, .is_cuda = true};
constexpr Machine kTuningCpu{.bytes_per_second = 10e9, .flops_per_second = 200e9, .is_cuda = false};

TunableProblem tunable_norm(double bytes = 10e6, int64_t candidates = 4) {
  return {.op = "rms_norm_forward", .problem = "rows=1024", .calls = 2, .candidates = candidates, .bytes = bytes};
}

TEST(TuningPlan, TunesWhatTakesTimeAndHasAChoice) {
  const auto decisions = plan_tuning({tunable_norm()}, kTuningCpu, 10e3, 10);  // 2 calls of 1 ms in a step of 10 ms
  ASSERT_EQ(decisions.size(), 1u);
  EXPECT_TRUE(decisions[0].tunes);
  EXPECT_TRUE(decisions[0].listed);
  EXPECT_NEAR(decisions[0].share, 2 * 1003 / 10e3, 1e-9);
  // Set-up, then four candidates: each checked and run 17 times.
  EXPECT_NEAR(decisions[0].seconds, 0.02 + 0.02 + 4 * (0.02 + 17 * 1003e-6), 1e-9);
  EXPECT_EQ(decisions[0].reason, "about 20 % of the step, 4 candidates, some 0.2 s");
}

TEST(TuningPlan, TheSlowerOfBothRoofsPredicts) {
  TunableProblem product{.op = "matmul", .problem = "m=1", .candidates = 2, .bytes = 1e6, .flops = 2e9};
  EXPECT_NEAR(plan_tuning({product}, kTuningCpu, 1e6, 10)[0].share, (1e4 + 3) / 1e6, 1e-9);
  product.flops = 1e6;
  EXPECT_NEAR(plan_tuning({product}, kTuningCpu, 1e6, 10)[0].share, (100 + 3) / 1e6, 1e-9);
}

TEST(TuningPlan, WhatHasNoChoiceOrTakesLittleIsNotTunedNorListed) {
  const auto one = plan_tuning({tunable_norm(10e6, 1)}, kTuningCpu, 10e3, 10)[0];
  EXPECT_FALSE(one.tunes || one.listed);
  EXPECT_NE(one.reason.find("one kernel"), std::string::npos) << one.reason;
  const auto small = plan_tuning({tunable_norm()}, kTuningCpu, 1e6, 10)[0];
  EXPECT_FALSE(small.tunes || small.listed);
  EXPECT_EQ(small.reason, "it takes about 0.2 % of the step; from 2.0 % on it pays");
  EXPECT_EQ(small.seconds, 0);
}

TEST(TuningPlan, WhatIsChosenAlreadyIsListedAndLeft) {
  TunableProblem problem = tunable_norm();
  problem.decided = true;
  const auto decision = plan_tuning({problem}, kTuningCpu, 10e3, 10)[0];
  EXPECT_FALSE(decision.tunes);
  EXPECT_TRUE(decision.listed);
  EXPECT_NE(decision.reason.find("measurement"), std::string::npos) << decision.reason;
}

TEST(TuningPlan, TheLargestShareComesFirstAndTheBudgetHolds) {
  const TunableProblem large = tunable_norm(100e6, 20), middle = tunable_norm(50e6, 20), small = tunable_norm(20e6, 20);
  double whole = 0;
  for (const auto& one : plan_tuning({small, large, middle}, kTuningCpu, 40e3, 100)) {
    EXPECT_TRUE(one.tunes);
    whole += one.seconds;
  }
  const auto cut = plan_tuning({small, large, middle}, kTuningCpu, 40e3, 5);
  EXPECT_GT(whole, 5);
  EXPECT_TRUE(cut[1].tunes);
  EXPECT_TRUE(cut[2].tunes);
  EXPECT_NEAR(cut[1].seconds + cut[2].seconds, 5, 1e-9);  // the second gets what is left
  EXPECT_FALSE(cut[0].tunes);
  EXPECT_TRUE(cut[0].listed);
  EXPECT_EQ(cut[0].reason.rfind("no time left in the budget: about ", 0), 0u) << cut[0].reason;
  for (const auto& one : plan_tuning({small, large, middle}, kTuningCpu, 40e3, 0)) EXPECT_FALSE(one.tunes);
}

TEST(TuningPlan, OneProblemTakesTenSecondsAtMost) {
  EXPECT_EQ(plan_tuning({tunable_norm(10e9, 100)}, kTuningCpu, 1e6, 1000)[0].seconds, 10);
}

TEST(TuningPlan, AGpuCompilesItsCandidates) {
  const double seconds = plan_tuning({tunable_norm(40e6, 5)}, kTuningGpu, 100, 100)[0].seconds;
  EXPECT_NEAR(seconds, 0.02 + 0.08 + 5 * (0.4 + 17 * 200e-6), 1e-9);
}

TEST(TuningPlan, RefusesNonsense) {
  EXPECT_TRUE(plan_tuning({}, kTuningCpu, 1, 0).empty());
  EXPECT_THROW(plan_tuning({}, {}, 1, 0), Error);
  EXPECT_THROW(plan_tuning({}, kTuningCpu, 0, 0), Error);
  EXPECT_THROW(plan_tuning({}, kTuningCpu, 1, -1), Error);
  EXPECT_THROW(plan_tuning({tunable_norm(-1)}, kTuningCpu, 1, 1), Error);
  EXPECT_THROW(plan_tuning({tunable_norm(1, -1)}, kTuningCpu, 1, 1), Error);
}

}  // namespace
}  // namespace kernel_pytorch::plan
