#include "kernel_pytorch/plan/offload_plan.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>

#include "kernel_pytorch/base/error.h"

namespace kernel_pytorch::plan {
namespace {

// fp32 states and masters of bf16 weights, on a host like the H200's.
OffloadRequest usual() {
  return {.elements = 268e6,
          .subgroup_elements = 8e6,
          .rates = {.up = 54e9, .down = 54e9, .host_memory = 160e9, .cpu = 4.9e9, .device = 130e9},
          .on_device = {.up = 12, .down = 12, .host_memory = 24},
          .on_cpu = {.up = 2, .down = 2, .host_memory = 32}};
}

double seconds_at(const OffloadRequest& request, double f) {
  const OffloadRates& rates = request.rates;
  const OffloadBytes &d = request.on_device, &c = request.on_cpu;
  return request.elements *
         std::max({(f * d.up + (1 - f) * c.up) / rates.up, (f * d.down + (1 - f) * c.down) / rates.down,
                   (f * d.host_memory + (1 - f) * c.host_memory) / rates.host_memory, (1 - f) / rates.cpu,
                   f / rates.device});
}

TEST(OffloadPlan, TheBoundIsTheLeastOverAllShares) {
  std::mt19937 random(1);
  std::uniform_real_distribution<double> factor(0.1, 10);
  for (int i = 0; i < 200; ++i) {
    OffloadRequest request = usual();
    for (double* rate : {&request.rates.up, &request.rates.down, &request.rates.host_memory, &request.rates.cpu,
                         &request.rates.device}) {
      *rate *= factor(random);
    }
    double least = seconds_at(request, 1);
    for (int step = 0; step < 2000; ++step) least = std::min(least, seconds_at(request, step / 2000.0));
    const OffloadPlan plan = plan_offload(request);
    EXPECT_LE(plan.bound_seconds, least * (1 + 1e-12));
    EXPECT_GE(plan.bound_seconds, least * 0.99);
    EXPECT_NEAR(seconds_at(request, plan.bound_share), plan.bound_seconds, 1e-12);
    EXPECT_GE(plan.predicted_seconds, plan.bound_seconds * (1 - 1e-12)) << plan.reason;
    EXPECT_TRUE(plan.on_device >= 0 && plan.on_device <= plan.subgroups);
  }
}

TEST(OffloadPlan, NoOtherNumberOfSubgroupsIsPredictedMuchFaster) {
  OffloadRequest request = usual();
  const OffloadPlan plan = plan_offload(request);
  EXPECT_EQ(plan.subgroups, 34);
  for (int64_t other = 0; other <= plan.subgroups; ++other) {
    request.device_share = static_cast<double>(other) / static_cast<double>(plan.subgroups);
    EXPECT_GE(plan_offload(request).predicted_seconds, plan.predicted_seconds * 0.999) << other;
  }
}

TEST(OffloadPlan, AGivenShareIsKept) {
  OffloadRequest request = usual();
  request.device_share = 0;
  EXPECT_EQ(plan_offload(request).on_device, 0);
  EXPECT_EQ(plan_offload(request).limit, "cpu");
  request.device_share = 1;
  EXPECT_EQ(plan_offload(request).on_device, 34);
  EXPECT_EQ(plan_offload(request).limit, "up");
}

TEST(OffloadPlan, ASlowCpuLeavesEverythingToTheDevice) {
  OffloadRequest request = usual();
  request.rates.cpu = 1e6;
  EXPECT_EQ(plan_offload(request).on_device, 34);
  request = usual();
  request.rates.up = 1e6;  // a slow link: weights still have to go up, states stay
  EXPECT_EQ(plan_offload(request).on_device, 0);
}

TEST(OffloadPlan, ImpossibleRequestsAreNamed) {
  OffloadRequest request = usual();
  request.rates.up = 0;
  EXPECT_THROW(plan_offload(request), Error);
  request = usual();
  request.device_share = 1.5;
  EXPECT_THROW(plan_offload(request), Error);
}

}  // namespace
}  // namespace kernel_pytorch::plan
