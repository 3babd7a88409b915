#include "kernel_pytorch/tuning/comparison.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <random>

#include <gtest/gtest.h>

#include "kernel_pytorch/base/error.h"
#include "kernel_pytorch/tuning/mann_whitney.h"

namespace kernel_pytorch::tuning {
namespace {

// Mann and Whitney's own definition, over every way to call values "after".
RankTest by_enumeration(const std::vector<double>& before, const std::vector<double>& after) {
  std::vector<double> all(before);
  all.insert(all.end(), after.begin(), after.end());
  const auto u_of = [&](const std::vector<bool>& is_after) {
    double u = 0;
    for (size_t i = 0; i < all.size(); ++i) {
      for (size_t j = 0; j < all.size(); ++j) {
        if (is_after[i] && !is_after[j]) u += all[i] > all[j] ? 1 : all[i] == all[j] ? 0.5 : 0;
      }
    }
    return u;
  };
  std::vector<bool> chosen(all.size(), false);
  std::fill(chosen.end() - static_cast<ptrdiff_t>(after.size()), chosen.end(), true);
  RankTest test;
  test.u = u_of(chosen);
  double total = 0, greater = 0, less = 0;
  std::sort(chosen.begin(), chosen.end());
  do {
    const double u = u_of(chosen);
    total += 1;
    greater += u >= test.u;
    less += u <= test.u;
  } while (std::next_permutation(chosen.begin(), chosen.end()));
  test.p_greater = greater / total;
  test.p_less = less / total;
  return test;
}

std::vector<double> numbers(std::mt19937& random, size_t count, int different) {
  std::vector<double> values(count);
  for (double& value : values) value = static_cast<double>(random() % static_cast<unsigned>(different));
  return values;
}

TEST(RankTest, IsTheDefinitionForSmallSamples) {
  std::mt19937 random(1);
  for (int turn = 0; turn < 60; ++turn) {
    const size_t before_count = 1 + random() % 6, after_count = 1 + random() % 6;
    const int different = turn % 3 == 0 ? 3 : turn % 3 == 1 ? 8 : 1000000;  // many ties, some, none
    const auto before = numbers(random, before_count, different), after = numbers(random, after_count, different);
    const RankTest got = rank_test(before, after), want = by_enumeration(before, after);
    ASSERT_TRUE(got.is_exact);
    ASSERT_EQ(got.u, want.u);
    ASSERT_NEAR(got.p_greater, want.p_greater, 1e-12);
    ASSERT_NEAR(got.p_less, want.p_less, 1e-12);
  }
}

TEST(RankTest, AgreesWithPrintedTables) {
  // The usual example, THHHHHTTTTTH: of the six by six pairs the tortoises are behind in 25.
  const std::vector<double> hares{2, 3, 4, 5, 6, 12}, tortoises{1, 7, 8, 9, 10, 11};
  EXPECT_EQ(rank_test(hares, tortoises).u, 25);
  // Critical values of Mann and Whitney's table, two-sided 0.05: u <= 2 for 5 and 5, u <= 23 for 10 and 10.
  const auto with_u = [](size_t count, size_t u) {  // `count` of each, no ties, and this u
    std::vector<double> before, after;
    for (size_t i = 0; i < count; ++i) before.push_back(10.0 * static_cast<double>(i + 1));
    size_t left = u;
    for (size_t i = 0; i < count; ++i) {
      const size_t beaten = std::min(left, count);
      left -= beaten;
      after.push_back(10.0 * static_cast<double>(beaten) + 1 + static_cast<double>(i) / 100);
    }
    return rank_test(before, after);
  };
  EXPECT_EQ(with_u(5, 2).u, 2);
  EXPECT_LE(with_u(5, 2).p_two_sided(), 0.05);
  EXPECT_GT(with_u(5, 3).p_two_sided(), 0.05);
  EXPECT_LE(with_u(10, 23).p_two_sided(), 0.05);
  EXPECT_GT(with_u(10, 24).p_two_sided(), 0.05);
  EXPECT_NEAR(with_u(5, 0).p_two_sided(), 2.0 / 252, 1e-12);
}

TEST(RankTest, ApproximationMeetsTheExactOne) {
  std::mt19937 random(2);
  for (const int different : {12, 1000000}) {
    auto before = numbers(random, 30, different), after = numbers(random, 30, different);
    const RankTest exact = rank_test(before, after);
    ASSERT_TRUE(exact.is_exact);
    // The same ranks from samples of 31: one value more at either end, on opposite sides.
    before.push_back(-1);
    after.push_back(2e6);
    const RankTest larger = rank_test(before, after);
    ASSERT_FALSE(larger.is_exact);
    EXPECT_EQ(larger.u, exact.u + 31 + 30);
    before.push_back(2e6 + 1), after.push_back(-2);
    const RankTest balanced = rank_test(before, after);
    EXPECT_NEAR(balanced.p_greater, exact.p_greater, 0.03);
    EXPECT_NEAR(balanced.p_less, exact.p_less, 0.03);
  }
}

TEST(RankTest, KnowsTheExtremes) {
  EXPECT_EQ(rank_test(std::vector<double>{1, 1, 1}, std::vector<double>{1, 1}).p_two_sided(), 1);
  const std::vector<double> same(100, 5.0);
  EXPECT_EQ(rank_test(same, same).p_two_sided(), 1);
  std::vector<double> low(100), high(100);
  std::iota(low.begin(), low.end(), 0), std::iota(high.begin(), high.end(), 100);
  EXPECT_LT(rank_test(low, high).p_greater, 1e-30);
  EXPECT_GT(rank_test(low, high).p_less, 0.999);
  EXPECT_THROW(rank_test({}, low), Error);
  EXPECT_THROW(rank_test(std::vector<double>{NAN}, low), Error);
}

TEST(RankTest, FindsNothingTooOften) {
  std::mt19937 random(3);
  std::exponential_distribution<double> tail(1);
  int found = 0;
  for (int turn = 0; turn < 1000; ++turn) {
    std::vector<double> before(10), after(10);
    for (double& value : before) value = 100 + tail(random);
    for (double& value : after) value = 100 + tail(random);
    found += rank_test(before, after).p_two_sided() < 0.05;
  }
  EXPECT_GT(found, 15);
  EXPECT_LT(found, 75);  // 43 expected of an exact test of tens, and four deviations of 6.4
}

TEST(Holm, RaisesAndKeepsTheOrder) {
  const std::vector<double> adjusted = holm_adjusted(std::vector<double>{0.01, 0.04, 0.03, 0.005});
  const std::vector<double> wanted{0.03, 0.06, 0.06, 0.02};
  for (size_t i = 0; i < wanted.size(); ++i) EXPECT_NEAR(adjusted[i], wanted[i], 1e-12);
  EXPECT_TRUE(holm_adjusted({}).empty());
}

class Timings {
 public:
  // Samples around `us` with a tail, and a control around 50 us times `machine`; noise of neighbours is shared.
  RunSamples run(double us, double machine = 1, size_t count = 400) {
    RunSamples run;
    double moment = 1;
    for (size_t i = 0; i < count; ++i) {
      if (i % 10 == 0) moment = 1 + 0.02 * tail_(random_);
      run.samples_us.push_back(us * machine * moment * (1 + 0.01 * tail_(random_)));
      run.control_us.push_back(50 * machine * moment * (1 + 0.01 * tail_(random_)));
    }
    return run;
  }

 private:
  std::mt19937 random_{4};
  std::exponential_distribution<double> tail_{1};
};

Change change_between(const Series& before, const Series& after) {
  return compare({{"one", before, after}}, {}).at(0).change;
}

TEST(Comparison, TellsChangesFromTheMachine) {
  Timings timings;
  const Series before{timings.run(100)};
  EXPECT_EQ(change_between(before, {timings.run(100)}), Change::kNone);
  EXPECT_EQ(change_between(before, {timings.run(102)}), Change::kNone);  // below the threshold
  EXPECT_EQ(change_between(before, {timings.run(115)}), Change::kSlower);
  EXPECT_EQ(change_between(before, {timings.run(85)}), Change::kFaster);
  EXPECT_EQ(change_between(before, {timings.run(100, 1.3)}), Change::kMachine);
  EXPECT_EQ(change_between(before, {timings.run(100, 0.7)}), Change::kMachine);
  EXPECT_EQ(change_between(before, {timings.run(120, 1.3)}), Change::kSlower);    // both
  EXPECT_EQ(change_between(before, {timings.run(120, 1 / 1.2)}), Change::kNone);  // no slower: nothing to report
}

TEST(Comparison, WithoutAControlTheTimesDecide) {
  Timings timings;
  RunSamples before = timings.run(100), after = timings.run(120);
  before.control_us.clear();
  EXPECT_EQ(change_between({before}, {after}), Change::kSlower);
  const SeriesChange change = compare({{"one", {before}, {after}}}, {}).at(0);
  EXPECT_EQ(change.control_ratio, 0);
  EXPECT_NEAR(change.ratio, 1.2, 0.02);
  EXPECT_TRUE(change.is_exact);
  EXPECT_LT(change.p, 1e-8);
}

TEST(Comparison, FewSamplesAreNotEnough) {
  EXPECT_EQ(change_between({{{1, 2, 3}, {}}}, {{{10, 20, 30}, {}}}), Change::kTooFew);
  EXPECT_EQ(change_between({{{1, 2, 3, 4, 5}, {}}}, {{{10, 20, 30, 40, 50}, {}}}), Change::kSlower);
}

TEST(Comparison, ManySeriesNeedStrongerEvidence) {
  // 2/252 is below 0.01 for one pair of fives, and not for two of them together.
  const SeriesPair pair{"one", {{{1, 2, 3, 4, 5}, {}}}, {{{10, 20, 30, 40, 50}, {}}}};
  EXPECT_EQ(compare({pair}, {}).at(0).change, Change::kSlower);
  EXPECT_EQ(compare({pair, pair}, {}).at(0).change, Change::kNone);
}

TEST(Comparison, RunsArePooled) {
  Timings timings;
  const Series before{timings.run(100), timings.run(100)}, after{timings.run(112), timings.run(112)};
  const SeriesChange change = compare({{"one", before, after}}, {}).at(0);
  EXPECT_EQ(change.change, Change::kSlower);
  EXPECT_FALSE(change.is_exact);  // forty medians of each
}

TEST(Comparison, RefusesWhatIsNoTime) {
  const Series good{{{1, 2}, {}}};
  EXPECT_THROW(change_between(good, {}), Error);
  EXPECT_THROW(change_between(good, {{{}, {}}}), Error);
  EXPECT_THROW(change_between(good, {{{1, -1}, {}}}), Error);
  EXPECT_THROW(change_between(good, {{{1, INFINITY}, {}}}), Error);
  EXPECT_THROW(change_between(good, {{{1, 2}, {1}}}), Error);
}

TEST(Comparison, BlocksCoverEveryValueOnce) {
  std::vector<double> values(47);
  std::iota(values.begin(), values.end(), 0);
  const std::vector<double> medians = block_medians(values, 20);
  ASSERT_EQ(medians.size(), 20u);
  EXPECT_TRUE(std::is_sorted(medians.begin(), medians.end()));
  EXPECT_EQ(medians.front(), 0.5);
  EXPECT_EQ(medians.back(), 45);
  EXPECT_EQ(block_medians({3, 1, 2}, 20), (std::vector<double>{3, 1, 2}));
}

}  // namespace
}  // namespace kernel_pytorch::tuning
