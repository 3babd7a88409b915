// The plan of a model by hand-made numbers: what is tried, what is refused and why, and how the budget is shared.
#include "kernel_pytorch/plan/optimize/model_plan.h"

#include <gtest/gtest.h>

#include "kernel_pytorch/base/error.h"

namespace kernel_pytorch::plan {
namespace {

constexpr Machine kGpu{.bytes_per_second = 4e12, .flops_per_second = 700e12, .is_cuda = true};
constexpr Machine kCpu{.bytes_per_second = 10e9, .flops_per_second = 200e9, .is_cuda = false};

Site norm(bool approximate = false) {
  return {.path = "layers.0.norm",
          .pattern = "rms_norm",
          .kind = 7,
          .before = {.bytes = 800e6, .flops = 0, .launches = 6},
          .after = {.bytes = 200e6, .flops = 0, .launches = 1},
          .pointwise = true,
          .approximate = approximate};
}

TEST(ModelPlan, PredictsByBothRoofsAndTheLaunches) {
  EXPECT_NEAR(predicted_us({.bytes = 4e9, .flops = 0, .launches = 2}, kGpu), 1000 + 8, 1e-6);
  EXPECT_NEAR(predicted_us({.bytes = 4e6, .flops = 7e12, .launches = 1}, kGpu), 1 + 10000 + 4, 1e-6);
  EXPECT_NEAR(predicted_us({.bytes = 1e9, .flops = 1e9, .launches = 1}, kCpu), 100000 + 5000 + 3, 1e-6);
  EXPECT_EQ(predicted_us({}, kCpu), 0);
}

TEST(ModelPlan, ProductsOfFloat8HaveTheirOwnRate) {
  Machine machine = kGpu;
  const Work work{.bytes = 4e6, .float8_flops = 7e12, .launches = 1};
  EXPECT_NEAR(predicted_us(work, machine), 1 + 10000 + 4, 1e-6);  // no units: at the rate of others
  machine.float8_flops_per_second = 1400e12;
  EXPECT_NEAR(predicted_us(work, machine), 1 + 5000 + 4, 1e-6);
  // A layer of 4096 x 4096 on 16384 tokens: half the time in products, three casts more.
  Site site{.path = "q",
            .pattern = "narrow product",
            .before = {.bytes = 268e6, .flops = 1.65e12, .launches = 4},
            .after = {}};
  site.after = {.bytes = 870e6, .float8_flops = 1.65e12, .launches = 7};
  site.approximate = true;
  EXPECT_TRUE(plan_model({site}, machine, {.tolerant = true, .budget_seconds = 60}).decisions[0].tries);
}

TEST(ModelPlan, TriesWhatMayGainAndSaysHowMuch) {
  const ModelPlan plan = plan_model({norm()}, kGpu, {.budget_seconds = 60});
  ASSERT_EQ(plan.decisions.size(), 1u);
  const SiteDecision& decision = plan.decisions[0];
  EXPECT_TRUE(decision.tries);
  EXPECT_FALSE(decision.only_as_a_whole);
  EXPECT_NEAR(decision.before_us, 200 + 24, 1e-6);
  EXPECT_NEAR(decision.after_us, 50 + 4, 1e-6);
  EXPECT_EQ(decision.reason, "800 MB and 6 launches before, 200 MB and 1 launch after: 4.15x predicted");
  EXPECT_TRUE(plan.notes.empty());
}

TEST(ModelPlan, RefusesWhatCannotGain) {
  Site site = norm();
  std::swap(site.before, site.after);
  const SiteDecision decision = plan_model({site}, kGpu, {.budget_seconds = 60}).decisions[0];
  EXPECT_FALSE(decision.tries);
  EXPECT_EQ(decision.measure_seconds, 0);
  EXPECT_EQ(decision.reason.rfind("nothing to gain: ", 0), 0u) << decision.reason;
}

TEST(ModelPlan, TriesEqualWorkSinceKernelsDiffer) {
  Site site = norm();
  site.after = site.before;
  EXPECT_TRUE(plan_model({site}, kGpu, {.budget_seconds = 60}).decisions[0].tries);
}

TEST(ModelPlan, RoundingMoreNeedsLeave) {
  const SiteDecision exact = plan_model({norm(true)}, kGpu, {.budget_seconds = 60}).decisions[0];
  EXPECT_FALSE(exact.tries);
  EXPECT_NE(exact.reason.find("accuracy=\"tolerant\""), std::string::npos) << exact.reason;
  EXPECT_TRUE(plan_model({norm(true)}, kGpu, {.tolerant = true, .budget_seconds = 60}).decisions[0].tries);
}

TEST(ModelPlan, UnderACompilerPointwisePartsAreForTheWholeToDecide) {
  Site product = norm();
  product.pointwise = false;
  const ModelPlan plan = plan_model({norm(), product}, kGpu, {.compiled = true, .budget_seconds = 60});
  EXPECT_TRUE(plan.decisions[0].only_as_a_whole);
  EXPECT_FALSE(plan.decisions[1].only_as_a_whole);
  EXPECT_EQ(plan.notes.size(), 1u);
}

TEST(ModelPlan, SharesTheBudgetByKindsAndKeepsBelowIt) {
  std::vector<Site> sites;
  for (int64_t kind = 0; kind < 40; ++kind) {
    Site site = norm();
    site.kind = kind;
    site.before.bytes = 100e9;  // 10 s a run
    sites.push_back(site);
    sites.push_back(site);  // the same kind again costs no more
  }
  const ModelPlan plan = plan_model(sites, kCpu, {.budget_seconds = 10});
  double sum = 0;
  for (size_t i = 0; i < plan.decisions.size(); i += 2) {
    EXPECT_EQ(plan.decisions[i].measure_seconds, plan.decisions[i + 1].measure_seconds);
    sum += plan.decisions[i].measure_seconds;
  }
  EXPECT_NEAR(sum, 5, 1e-9);
  EXPECT_NEAR(plan_model({norm()}, kGpu, {.budget_seconds = 60}).decisions[0].measure_seconds, 0.02, 1e-9);
  Site small = norm();
  small.before.bytes = small.after.bytes = 1e3;
  EXPECT_NEAR(plan_model({small}, kCpu, {.budget_seconds = 60}).decisions[0].measure_seconds, 0.12, 1e-9);
  EXPECT_NEAR(plan_model({small}, kCpu, {.budget_seconds = 5}).decisions[0].measure_seconds, 0.02, 1e-9);
}

TEST(ModelPlan, NoSitesNoDecisions) {
  EXPECT_TRUE(plan_model({}, kCpu, {.budget_seconds = 1}).decisions.empty());
}

TEST(ModelPlan, RefusesNonsense) {
  EXPECT_THROW(plan_model({norm()}, {}, {.budget_seconds = 1}), Error);
  EXPECT_THROW(plan_model({norm()}, kCpu, {.budget_seconds = -1}), Error);
  Site site = norm();
  site.before.bytes = -1;
  EXPECT_THROW(plan_model({site}, kCpu, {.budget_seconds = 1}), Error);
  site.before.bytes = 1;
  site.after.float8_flops = -1;
  EXPECT_THROW(plan_model({site}, kCpu, {.budget_seconds = 1}), Error);
}

}  // namespace
}  // namespace kernel_pytorch::plan
