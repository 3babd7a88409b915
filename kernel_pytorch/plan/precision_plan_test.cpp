#include "kernel_pytorch/plan/precision_plan.h"

#include <gtest/gtest.h>

#include <limits>
#include <random>

#include "kernel_pytorch/base/error.h"

namespace kernel_pytorch::plan {
namespace {

PrecisionRequest random_request(std::mt19937& random, int layers, int choices) {
  std::uniform_int_distribution<int64_t> bytes(0, 40);
  std::uniform_real_distribution<double> error(0, 1);
  PrecisionRequest request;
  for (int i = 0; i < layers; ++i) {
    std::vector<FormatChoice> layer(1 + random() % static_cast<unsigned>(choices));
    for (FormatChoice& choice : layer) choice = {bytes(random), error(random)};
    request.layers.push_back(layer);
  }
  request.budget_bytes = bytes(random) * layers / 2;
  return request;
}

// The least error of all choices within the budget; infinity where none fits.
double exhaustive(const PrecisionRequest& request, size_t layer, int64_t bytes, double error) {
  if (bytes > request.budget_bytes) return std::numeric_limits<double>::infinity();
  if (layer == request.layers.size()) return error;
  double least = std::numeric_limits<double>::infinity();
  for (const FormatChoice& choice : request.layers[layer]) {
    least = std::min(least, exhaustive(request, layer + 1, bytes + choice.bytes, error + choice.error));
  }
  return least;
}

void expect_consistent(const PrecisionRequest& request, const PrecisionPlan& plan) {
  int64_t bytes = 0;
  double error = 0;
  ASSERT_EQ(plan.choices.size(), request.layers.size());
  for (size_t i = 0; i < request.layers.size(); ++i) {
    const FormatChoice& choice = request.layers[i].at(static_cast<size_t>(plan.choices[i]));
    bytes += choice.bytes;
    error += choice.error;
  }
  EXPECT_EQ(plan.bytes, bytes);
  EXPECT_NEAR(plan.error, error, 1e-12);
}

TEST(PrecisionPlan, IsTheBestOfAllChoices) {
  std::mt19937 random(1);
  int fitting = 0;
  for (int i = 0; i < 400; ++i) {
    const PrecisionRequest request = random_request(random, 1 + i % 6, 5);
    const PrecisionPlan plan = plan_precision(request);
    const double best = exhaustive(request, 0, 0, 0);
    expect_consistent(request, plan);
    EXPECT_TRUE(plan.is_exact);
    ASSERT_EQ(plan.fits, std::isfinite(best)) << plan.reason;
    if (!plan.fits) {
      EXPECT_EQ(plan.bytes, plan.least_bytes);
      continue;
    }
    ++fitting;
    EXPECT_LE(plan.bytes, request.budget_bytes);
    EXPECT_NEAR(plan.error, best, 1e-12);
  }
  EXPECT_GT(fitting, 100);
}

TEST(PrecisionPlan, FewerWaysAreCloseAndWithinTheBudget) {
  std::mt19937 random(2);
  for (int i = 0; i < 20; ++i) {
    PrecisionRequest request = random_request(random, 40, 5);
    const PrecisionPlan exact = plan_precision(request);
    request.most_ways = 64;
    const PrecisionPlan coarse = plan_precision(request);
    expect_consistent(request, coarse);
    EXPECT_EQ(coarse.fits, exact.fits);
    if (exact.fits) {
      EXPECT_LE(coarse.bytes, request.budget_bytes);
    }
    EXPECT_GE(coarse.error, exact.error - 1e-12);
    EXPECT_LE(coarse.error, exact.error * 1.2 + 1e-12);
  }
}

TEST(PrecisionPlan, NoLayersAndBadRequests) {
  EXPECT_TRUE(plan_precision({}).fits);
  EXPECT_THROW(plan_precision({.layers = {{}}}), Error);
  EXPECT_THROW(plan_precision({.layers = {{{.bytes = -1}}}}), Error);
  EXPECT_THROW(plan_precision({.layers = {{{.error = std::numeric_limits<double>::quiet_NaN()}}}}), Error);
  EXPECT_THROW(plan_precision({.budget_bytes = -1}), Error);
}

}  // namespace
}  // namespace kernel_pytorch::plan
