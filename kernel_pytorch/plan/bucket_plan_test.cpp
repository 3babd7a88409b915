#include "kernel_pytorch/plan/bucket_plan.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <random>

#include "kernel_pytorch/base/emulation_test.h"
#include "kernel_pytorch/base/error.h"

namespace kernel_pytorch::plan {
namespace {

double cost_at(const LengthCost& cost, int64_t length) {
  const auto l = static_cast<double>(length);
  return std::max(cost.floor, cost.linear * l + cost.quadratic * l * l);
}

double cost_of(const BucketRequest& request, const std::vector<int64_t>& buckets) {
  double total = request.cost.bucket * static_cast<double>(buckets.size());
  for (const LengthCount& item : request.lengths) {
    total += item.count * cost_at(request.cost, *std::ranges::lower_bound(buckets, item.length));
  }
  return total;
}

// Every set of at most max_buckets of the (aligned) lengths that holds the longest.
double brute_force(const BucketRequest& request) {
  std::vector<int64_t> lengths;
  for (const LengthCount& item : request.lengths) {
    lengths.push_back((item.length + request.alignment - 1) / request.alignment * request.alignment);
  }
  std::ranges::sort(lengths);
  lengths.erase(std::ranges::unique(lengths).begin(), lengths.end());
  double least = std::numeric_limits<double>::infinity();
  for (uint32_t set = uint32_t{1} << (lengths.size() - 1); set < uint32_t{1} << lengths.size(); ++set) {
    if (std::popcount(set) > request.max_buckets) continue;
    std::vector<int64_t> buckets;
    for (size_t i = 0; i < lengths.size(); ++i) {
      if ((set >> i & 1) != 0) buckets.push_back(lengths[i]);
    }
    least = std::min(least, cost_of(request, buckets));
  }
  return least;
}

TEST(BucketPlan, IsAsCheapAsTheBestOfAllSets) {
  std::mt19937 random(7);
  const auto draw = [&](int64_t first, int64_t end) {
    return std::uniform_int_distribution<int64_t>(first, end)(random);
  };
  for (int trial = 0; trial < 400; ++trial) {
    BucketRequest request;
    const int64_t items = draw(1, 12);
    for (int64_t i = 0; i < items; ++i) {
      request.lengths.push_back({draw(1, trial % 2 == 0 ? 40 : 4000), static_cast<double>(draw(0, 50))});
    }
    request.max_buckets = draw(1, 8);
    request.alignment = trial % 3 == 0 ? draw(2, 16) : 1;
    request.cost = {.floor = trial % 5 == 0 ? 100.0 : 0.0,
                    .linear = static_cast<double>(draw(0, 3)),
                    .quadratic = static_cast<double>(draw(0, 10)) / 256,
                    .bucket = trial % 4 == 0 ? static_cast<double>(draw(0, 5000)) : 0.0};
    const BucketPlan plan = plan_buckets(request, DeviceInfo{});
    ASSERT_LE(static_cast<int64_t>(plan.buckets.size()), request.max_buckets);
    ASSERT_TRUE(std::ranges::is_sorted(plan.buckets, std::less_equal<>()));
    for (int64_t bucket : plan.buckets) ASSERT_EQ(bucket % request.alignment, 0);
    const double expected = brute_force(request);
    ASSERT_NEAR(plan.cost, expected, 1e-9 * std::max(1.0, expected)) << "trial " << trial;
    ASSERT_NEAR(cost_of(request, plan.buckets), expected, 1e-9 * std::max(1.0, expected)) << "trial " << trial;
  }
}

TEST(BucketPlan, CountsPaddingAndKeepsWhatMustFit) {
  const BucketRequest request{.lengths = {{10, 3}, {12, 1}, {100, 1}}, .max_buckets = 2};
  const BucketPlan plan = plan_buckets(request, DeviceInfo{});
  EXPECT_EQ(plan.buckets, (std::vector<int64_t>{12, 100}));
  EXPECT_DOUBLE_EQ(plan.padding_overhead, 148.0 / 142.0 - 1);
  EXPECT_DOUBLE_EQ(plan.unpadded_cost, 142);
  BucketRequest longer = request;
  longer.longest = 500;
  EXPECT_EQ(plan_buckets(longer, DeviceInfo{}).buckets.back(), 500);
  BucketRequest dear = request;
  dear.cost.bucket = 1e6;
  EXPECT_EQ(plan_buckets(dear, DeviceInfo{}).buckets, (std::vector<int64_t>{100}));
}

TEST(BucketPlan, GridsReachFromShortestToLongest) {
  BucketRequest request{.lengths = {{16, 1}, {2048, 1}}, .strategy = BucketStrategy::kGeometric, .max_buckets = 7};
  EXPECT_EQ(plan_buckets(request, DeviceInfo{}).buckets, (std::vector<int64_t>{32, 64, 128, 256, 512, 1024, 2048}));
  request.strategy = BucketStrategy::kLinear;
  request.max_buckets = 4;
  EXPECT_EQ(plan_buckets(request, DeviceInfo{}).buckets, (std::vector<int64_t>{524, 1032, 1540, 2048}));
  request.alignment = 64;
  EXPECT_EQ(plan_buckets(request, DeviceInfo{}).buckets, (std::vector<int64_t>{576, 1088, 1600, 2048}));
}

TEST(BucketPlan, FillsTheTilesOfTheDevice) {
  DeviceInfo hopper;
  hopper.device = {DeviceKind::kCuda, 0};
  BucketRequest request{.strategy = BucketStrategy::kHardwareAware, .max_buckets = 64};
  for (int64_t length : {17, 130, 300, 700, 1030, 3000}) request.lengths.push_back({length, 1});
  EXPECT_EQ(plan_buckets(request, hopper).buckets, (std::vector<int64_t>{32, 160, 320, 768, 1152, 3072}));
  EXPECT_EQ(plan_buckets(request, DeviceInfo{}).buckets, (std::vector<int64_t>{24, 144, 304, 704, 1040, 3008}));
}

TEST(BucketPlan, AdaptiveChangesOnlyForAGain) {
  BucketRequest request{.lengths = {{10, 5}, {20, 5}, {41, 5}},
                        .strategy = BucketStrategy::kAdaptive,
                        .max_buckets = 3,
                        .current = {10, 21, 42}};
  EXPECT_EQ(plan_buckets(request, DeviceInfo{}).buckets, request.current);
  EXPECT_FALSE(plan_buckets(request, DeviceInfo{}).changes);
  request.current = {41};
  const BucketPlan drifted = plan_buckets(request, DeviceInfo{});
  EXPECT_EQ(drifted.buckets, (std::vector<int64_t>{10, 20, 41}));
  EXPECT_TRUE(drifted.changes);
  EXPECT_DOUBLE_EQ(drifted.current_cost, 15 * 41.0);
  request.current = {10, 20};
  EXPECT_NE(plan_buckets(request, DeviceInfo{}).reason.find("too short"), std::string::npos);
}

TEST(BucketPlan, RefusesWhatMakesNoSense) {
  const auto refused = [](BucketRequest request) { EXPECT_THROW(plan_buckets(request, DeviceInfo{}), Error); };
  refused({});
  refused({.lengths = {{0, 1}}});
  refused({.lengths = {{5, -1}}});
  refused({.lengths = {{5, 1}}, .max_buckets = 0});
  refused({.lengths = {{5, 1}}, .alignment = 0});
  refused({.lengths = {{5, 1}}, .cost = {.linear = -1}});
  refused({.lengths = {{5, 1}}, .current = {8, 8}});
  EXPECT_EQ(bucket_strategy_of("linear"), BucketStrategy::kLinear);
  EXPECT_THROW(bucket_strategy_of("best"), Error);
}

TEST(BucketPlan, TakesAHundredThousandLengths) {
  BucketRequest request{.max_buckets = 64, .cost = {.linear = 1, .quadratic = 1e-3}};
  std::mt19937 random(3);
  for (int64_t i = 1; i <= 100'000; ++i) request.lengths.push_back({i, 1.0 + static_cast<double>(random() % 100)});
  const auto begin = std::chrono::steady_clock::now();
  const BucketPlan plan = plan_buckets(request, DeviceInfo{});
  const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - begin;
  EXPECT_EQ(plan.buckets.size(), 64u);
  EXPECT_LT(plan.padding_overhead, 0.02);
  EXPECT_LT(seconds.count(),
            unless_emulated(10.0, 200.0));  // n*k*log would be seconds, n*n*k hours, under every sanitizer
}

}  // namespace
}  // namespace kernel_pytorch::plan
