#include "kernel_pytorch/plan/optimize/verdict.h"

#include <gtest/gtest.h>

#include "kernel_pytorch/base/error.h"

namespace kernel_pytorch::plan {
namespace {

Timing around(double us) {
  return {us, us - 1, us + 1};
}

Comparison to(double us) {
  return {around(1000), around(us)};
}

constexpr Comparison kBlurred = {{1000, 900, 1100}, {950, 850, 1050}};  // quartiles overlap

TEST(Verdict, TheWholePaysByAPercentBeyondDoubt) {
  EXPECT_TRUE(pays(to(900)));
  EXPECT_FALSE(pays(to(995))) << "half a percent";
  EXPECT_TRUE(is_faster(to(995)));
  EXPECT_FALSE(is_faster(to(999))) << "a thousandth, and the quartiles touch";
  EXPECT_FALSE(pays(kBlurred) || is_faster(kBlurred));
  EXPECT_FALSE(pays(to(1100)) || is_faster(to(1100)));
}

TEST(Verdict, OneSlowTurnAmongFewHidesNoLargeGain) {
  constexpr Timing kSlowTurn = {100, 95, 1200};
  EXPECT_TRUE(pays({{1000, 900, 1100}, kSlowTurn}));
  EXPECT_FALSE(pays({{110, 105, 120}, kSlowTurn}));
}

TEST(Verdict, TurnsSideBySideTellWhatBlurredQuartilesHide) {
  Comparison blurred = kBlurred;
  blurred.sure_gain = 1.02;
  EXPECT_TRUE(pays(blurred) && is_faster(blurred));
  EXPECT_EQ(judge_part({{blurred}}, 0).way, 0);
  blurred.sure_gain = 1.005;
  EXPECT_FALSE(pays(blurred));
  EXPECT_TRUE(is_faster(blurred));
  Comparison slower = to(1010);
  slower.sure_gain = 1.02;
  EXPECT_FALSE(is_faster(slower)) << "its quartiles say otherwise";
}

TEST(Verdict, TuningIsConfirmedByHalfOfWhatItPromised) {
  EXPECT_TRUE(confirms_tuning(to(950), 100));
  EXPECT_FALSE(confirms_tuning(to(951), 100));
  EXPECT_FALSE(confirms_tuning(to(1050), -200));
}

TEST(Verdict, OfWaysThatTieTheEarlierStays) {
  EXPECT_EQ(judge_part({{to(900)}, {to(895)}}, 0).way, 0);
  EXPECT_EQ(judge_part({{to(900)}, {to(880)}}, 0).way, 1);
  EXPECT_EQ(judge_part({{}, {to(900)}}, 0).way, 1) << "the first computes something else";
  EXPECT_EQ(judge_part({{to(1100)}, {}}, 0).way, -1);
  EXPECT_EQ(judge_part({}, 0).way, -1);
}

TEST(Verdict, WhatTheClockCannotTellIsLeftToATrialTogether) {
  const PartVerdict small = judge_part({{to(996)}}, 0);
  EXPECT_EQ(small.way, -1);
  EXPECT_EQ(small.maybe, 0);
  EXPECT_EQ(judge_part({{to(1001)}}, 0).maybe, -1);
  EXPECT_EQ(judge_part({{to(1000)}}, 200).maybe, 0) << "less work by the plan";
  EXPECT_EQ(judge_part({{to(1000)}}, 5).maybe, -1) << "too little to matter";
  EXPECT_EQ(judge_part({{to(1100)}}, 200).maybe, -1) << "measured slower";
  EXPECT_EQ(judge_part({{to(997)}, {to(993)}}, 0).maybe, 1);
  EXPECT_EQ(judge_part({{to(997)}, {to(900)}}, 0).maybe, -1) << "one way is kept, nothing is undecided";
}

TEST(Verdict, LessTimeOfOneClockAndNoMoreOfTheOtherIsEnough) {
  const PartVerdict by_calls = judge_part({{to(1000), to(900)}}, 0);
  EXPECT_EQ(by_calls.way, 0);
  EXPECT_FALSE(by_calls.costs_calls);
  EXPECT_EQ(judge_part({{to(1100), to(900)}}, 0).way, -1) << "the device works longer";
  EXPECT_FALSE(judge_part({{to(900), to(1000)}}, 0).costs_calls);
  EXPECT_TRUE(judge_part({{to(900), to(1100)}}, 0).costs_calls);
}

TEST(Verdict, RefusesTimingsThatAreNone) {
  EXPECT_THROW(pays({{0, 0, 0}, around(5)}), Error);
  EXPECT_THROW(judge_part({{{around(5), {5, 4, -1}}}}, 0), Error);
}

}  // namespace
}  // namespace kernel_pytorch::plan
