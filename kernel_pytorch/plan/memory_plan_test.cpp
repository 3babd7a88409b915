#include "kernel_pytorch/plan/memory_plan.h"

#include <gtest/gtest.h>

#include "kernel_pytorch/base/error.h"

namespace kernel_pytorch::plan {
namespace {

TEST(MemoryPlan, FindsThePeakAndWhatItIsMadeOf) {
  const MemoryPlan plan = plan_memory({{100, MemoryKind::kParameters},
                                       {10, MemoryKind::kInputs},
                                       {50, MemoryKind::kActivations},
                                       {30, MemoryKind::kActivations},
                                       {-50, MemoryKind::kActivations},
                                       {100, MemoryKind::kGradients},
                                       {-30, MemoryKind::kActivations},
                                       {40, MemoryKind::kOptimizer}});
  EXPECT_EQ(plan.peak_bytes, 250);
  EXPECT_EQ(plan.bytes_at_peak, (std::array<int64_t, 5>{100, 100, 40, 10, 0}));
  EXPECT_EQ(plan.left_bytes, 250);
  const MemoryPlan forward_peak =
      plan_memory({{100, MemoryKind::kParameters}, {90, MemoryKind::kActivations}, {-90, MemoryKind::kActivations}});
  EXPECT_EQ(forward_peak.peak_bytes, 190);
  EXPECT_EQ(forward_peak.bytes_at_peak[4], 90);
  EXPECT_EQ(forward_peak.left_bytes, 100);
  EXPECT_EQ(plan_memory({}).peak_bytes, 0);
  EXPECT_THROW(plan_memory({{10, MemoryKind::kInputs}, {-10, MemoryKind::kActivations}}), Error);
  EXPECT_THROW(plan_memory({{INT64_MAX, MemoryKind::kInputs}, {1, MemoryKind::kInputs}}), Error);
}

TEST(MemoryPlan, TakesTheBatchThatFitsOrIsEnough) {
  BatchRequest request{
      .first_batch = 1, .second_batch = 3, .first_bytes = 110, .second_bytes = 130, .capacity_bytes = 1000};
  EXPECT_EQ(plan_batch(request).fits, 80);  // 900 usable, 100 fixed, 10 a sample
  EXPECT_EQ(plan_batch(request).batch, 64);
  request.capacity_bytes = 500;
  EXPECT_EQ(plan_batch(request).batch, 32);
  request.fixed_us = 100;
  request.sample_us = 400;
  EXPECT_EQ(plan_batch(request).batch, 8) << "19 * 100 / 400 samples are enough";
  request.sample_us = 1;
  EXPECT_EQ(plan_batch(request).batch, 32);
  request.capacity_bytes = 100;
  EXPECT_EQ(plan_batch(request).batch, 0);
  EXPECT_NE(plan_batch(request).reason.find("one sample needs"), std::string::npos);
  request.second_batch = 1;
  EXPECT_THROW(plan_batch(request), Error);
}

}  // namespace
}  // namespace kernel_pytorch::plan
