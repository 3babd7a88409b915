#include "kernel_pytorch/plan/context_parallel_plan.h"

#include <gtest/gtest.h>

#include "kernel_pytorch/base/error.h"

namespace kernel_pytorch::plan {
namespace {

// Llama's heads, a million tokens on eight members.
ContextParallelRequest long_request() {
  return {
      .members = 8, .sequence = 1 << 20, .heads = 32, .key_heads = 8, .size = 128, .value_size = 128, .causal = true};
}
const ScheduleCost& cost_of(const ContextParallelPlan& plan, std::string_view schedule) {
  for (const ScheduleCost& cost : plan.schedules) {
    if (cost.schedule == schedule) return cost;
  }
  throw std::out_of_range(std::string(schedule));
}

TEST(ContextParallelPlan, LongCausalSequencesAreBalancedAndHideTheirHops) {
  ContextParallelRequest request = long_request();
  request.heads = 36, request.key_heads = 9;  // which eight members cannot share
  const ContextParallelPlan plan = plan_context_parallel(request);
  EXPECT_EQ(plan.schedule, "zigzag") << plan.reason;
  EXPECT_EQ(cost_of(plan, "zigzag").exposed_us, 0);
  const double ratio = cost_of(plan, "ring").work_us / cost_of(plan, "zigzag").work_us;
  EXPECT_NEAR(ratio, 2.0 - 1.0 / 8, 1e-9) << "the last of eight members sees nearly all keys";
  EXPECT_NE(plan.reason.find("ulysses: 36 heads"), std::string::npos) << plan.reason;
}

TEST(ContextParallelPlan, TheForwardOfAMillionTokensTakesWhatItsProductsTake) {
  const ContextParallelPlan plan = plan_context_parallel(long_request());
  const double flops = 4.0 * 32 * 128 * (1 << 20) * (1 << 19);
  EXPECT_NEAR(cost_of(plan, "zigzag").work_us, flops / 8 / 6e14 * 1e6, 1);
}

TEST(ContextParallelPlan, WithoutACausalMaskARingNeedsNoZigzag) {
  ContextParallelRequest request = long_request();
  request.causal = false;
  const ContextParallelPlan plan = plan_context_parallel(request);
  EXPECT_EQ(cost_of(plan, "ring").us, cost_of(plan, "zigzag").us);
  EXPECT_NE(plan.schedule, "zigzag");
}

TEST(ContextParallelPlan, SlowLinksExposeHopsAndFewKeysMakeThemCheap) {
  ContextParallelRequest request = long_request();
  request.sequence = 16384;
  request.link_bytes_per_second = 5e9;
  request.key_heads = 1;
  const ContextParallelPlan few = plan_context_parallel(request);
  request.key_heads = 32;
  const ContextParallelPlan many = plan_context_parallel(request);
  EXPECT_GT(cost_of(many, "zigzag").exposed_us, 10 * cost_of(few, "zigzag").exposed_us);
  EXPECT_LT(cost_of(few, "zigzag").sent_bytes, cost_of(few, "ulysses").sent_bytes);
  EXPECT_GT(cost_of(many, "zigzag").sent_bytes, cost_of(many, "ulysses").sent_bytes);
}

TEST(ContextParallelPlan, BackwardSendsGradientsInFloats) {
  ContextParallelRequest request = long_request();
  const ContextParallelPlan forward = plan_context_parallel(request);
  request.backward = true;
  const ContextParallelPlan both = plan_context_parallel(request);
  const double keys = cost_of(forward, "ring").sent_bytes / 7;
  EXPECT_DOUBLE_EQ(cost_of(both, "ring").sent_bytes, 7 * keys + 7 * (keys + 2 * keys) + 2 * keys);
  EXPECT_NEAR(cost_of(both, "ring").work_us, 3.5 * cost_of(forward, "ring").work_us, 1e-3);
}

TEST(ContextParallelPlan, MemoryAndEqualRunsDecideToo) {
  ContextParallelRequest request = long_request();
  request.free_bytes = 4e9;
  const ContextParallelPlan plan = plan_context_parallel(request);
  EXPECT_NE(cost_of(plan, "allgather").obstacle.find("6.44 GB more"), std::string::npos);
  EXPECT_EQ(plan.schedule, "zigzag") << plan.reason;
  request.free_bytes = 1e9;
  EXPECT_THROW(plan_context_parallel(request), Error) << "no schedule fits";
  request.free_bytes = 0;
  request.sequence = 8 * 1001;  // no sixteen equal runs
  const ContextParallelPlan odd = plan_context_parallel(request);
  EXPECT_NE(cost_of(odd, "zigzag").obstacle, "");
  EXPECT_NE(odd.schedule, "zigzag");
  request.sequence = 1001;
  EXPECT_THROW(plan_context_parallel(request), Error);
}

TEST(ContextParallelPlan, OneMemberAndBadRequests) {
  EXPECT_EQ(plan_context_parallel({.members = 1}).schedule, "ring");
  EXPECT_THROW(plan_context_parallel({.members = 0}), Error);
  EXPECT_THROW(plan_context_parallel({.members = 2, .sequence = -4}), Error);
  EXPECT_THROW(plan_context_parallel({.members = 2, .sequence = 4, .link_bytes_per_second = 0}), Error);
}

}  // namespace
}  // namespace kernel_pytorch::plan
