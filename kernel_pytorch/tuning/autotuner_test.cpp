#include "kernel_pytorch/tuning/autotuner.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>

#include "kernel_pytorch/base/error.h"
#include "kernel_pytorch/device/cuda/driver.h"
#include "kernel_pytorch/tuning/temporary_store_test.h"

namespace kernel_pytorch::tuning {
namespace {

class Autotuner : public TemporaryStore {
 protected:
  Candidate waiting(const std::string& kernel, int64_t microseconds) {
    Candidate candidate;
    candidate.kernel = kernel;
    candidate.run = [this, kernel, microseconds](int rotation) {
      order_.push_back(kernel);
      rotations_.push_back(rotation);
      const auto end = std::chrono::steady_clock::now() + std::chrono::microseconds(microseconds);
      while (std::chrono::steady_clock::now() < end) {
      }
    };
    return candidate;
  }
  TuneReport tune(const std::vector<Candidate>& candidates, const TuneOptions& options = {}) {
    return autotune(key_, candidates, context_, options);
  }

  OwnContext context_;
  Key key_ = make_test_key("n=1");
  std::vector<std::string> order_;
  std::vector<int> rotations_;
};

TEST_F(Autotuner, PicksTheFastestAndRemembersIt) {
  const TuneReport report = tune({waiting("slow", 9000), waiting("fast", 300), waiting("middle", 3000)});
  ASSERT_EQ(report.rows.size(), 3u);
  EXPECT_EQ(report.rows[0].kernel, "fast");
  EXPECT_EQ(report.rows[1].kernel, "middle");
  EXPECT_EQ(report.rows[2].kernel, "slow");
  EXPECT_TRUE(report.complete);
  EXPECT_GE(report.rows[0].median_us, 300);
  EXPECT_LT(report.rows[0].median_us, 3000);
  EXPECT_GE(report.rows[0].spread_us, 0);
  EXPECT_EQ(find_measured(key_)->measurement.kernel, "fast");
  EXPECT_EQ(find_measured(key_)->measurement.median_us, report.rows[0].median_us);
  EXPECT_EQ(list_store().size(), 1u);
}

TEST_F(Autotuner, InterleavesAndDropsTheClearlySlower) {
  tune({waiting("a", 300), waiting("b", 310), waiting("slow", 5000)});
  const auto count = [&](const std::string& kernel) { return std::count(order_.begin(), order_.end(), kernel); };
  EXPECT_EQ(count("slow"), 2 + 3);  // warm-up, sizing, three rounds
  EXPECT_EQ(std::max(count("a"), count("b")), 2 + 15);
  // The first rounds take turns, each beginning with another candidate.
  const std::vector<std::string> rounds(order_.begin() + 6, order_.begin() + 15);
  EXPECT_EQ(rounds, (std::vector<std::string>{"a", "b", "slow", "b", "slow", "a", "slow", "a", "b"}));
}

TEST_F(Autotuner, RotatesTheBuffers) {
  TuneOptions options;
  options.rotations = 3;
  tune({waiting("a", 300), waiting("b", 300)}, options);
  for (size_t i = 0; i < rotations_.size(); ++i) EXPECT_EQ(rotations_[i], static_cast<int>(i % 3));
}

TEST_F(Autotuner, AWrongOrThrowingCandidateIsARowAndNoContender) {
  Candidate wrong = waiting("wrong", 1), throwing = waiting("throwing", 1), late = waiting("late", 1);
  wrong.check = [] { return std::string("wrong result: 7 instead of 8"); };
  throwing.check = []() -> std::string { fail(ErrorCode::kDevice, "no such luck"); };
  int runs = 0;
  late.run = [&runs](int) {
    if (++runs > 2) throw std::runtime_error("failed while timed");
  };
  const TuneReport report = tune({wrong, throwing, late, waiting("right", 200)});
  ASSERT_EQ(report.rows.size(), 4u);
  EXPECT_EQ(report.rows[0].kernel, "right");
  EXPECT_EQ(report.rows[1].failure, "wrong result: 7 instead of 8");
  EXPECT_EQ(report.rows[2].failure, "no such luck");
  EXPECT_EQ(report.rows[3].failure, "failed while timed");
  EXPECT_EQ(report.rows[3].median_us, 0);
  EXPECT_TRUE(report.complete);
  EXPECT_EQ(find_measured(key_)->measurement.kernel, "right");
}

TEST_F(Autotuner, NothingRightMeansNothingRemembered) {
  Candidate wrong = waiting("wrong", 1);
  wrong.check = [] { return std::string("wrong"); };
  EXPECT_EQ(tune({wrong}).rows.size(), 1u);
  EXPECT_FALSE(find_measured(key_).has_value());
  EXPECT_TRUE(tune({}).rows.empty());
}

TEST_F(Autotuner, AnInterruptKeepsWhatWasMeasured) {
  TuneOptions options;
  int asked = 0;
  options.interrupted = [&] { return ++asked > 2; };
  const TuneReport report = tune({waiting("a", 20'000), waiting("b", 200), waiting("c", 100)}, options);
  EXPECT_FALSE(report.complete);
  ASSERT_EQ(report.rows.size(), 2u);
  EXPECT_EQ(report.rows[0].kernel, "b");
  EXPECT_EQ(find_measured(key_)->measurement.kernel, "b");
}

TEST_F(Autotuner, TheBudgetEndsIt) {
  TuneOptions options;
  options.budget_seconds = 0.05;
  std::vector<Candidate> many;
  for (int i = 0; i < 100; ++i) many.push_back(waiting(concat("k", i), 3000));
  const TuneReport report = tune(many, options);
  EXPECT_FALSE(report.complete);
  EXPECT_LT(report.seconds, 2);
  EXPECT_GE(report.rows.size(), 1u);
}

TEST_F(Autotuner, ProgressRunsToItsEndWithTheBestSoFar) {
  TuneOptions options;
  std::vector<TuneProgress> seen;
  options.progress = [&](const TuneProgress& progress) { seen.push_back(progress); };
  Candidate wrong = waiting("wrong", 1);
  wrong.check = [] { return std::string("wrong"); };
  tune({waiting("slow", 500), wrong, waiting("fast", 250)}, options);
  ASSERT_EQ(seen.size(), 3u + 15u);
  for (size_t i = 0; i < seen.size(); ++i) EXPECT_EQ(seen[i].done, static_cast<int>(i) + 1);
  EXPECT_EQ(seen[0].best, "slow");
  EXPECT_EQ(seen[1].candidate_us, 0);
  EXPECT_EQ(seen[2].best, "fast");
  EXPECT_EQ(seen.back().done, seen.back().total);
  EXPECT_GE(seen.back().best_us, 250);
}

TEST_F(Autotuner, TimeInterleavedGivesMediansAndRemembersNothing) {
  const auto timings = time_interleaved({waiting("a", 400), waiting("b", 200)}, context_, 0.02, 2);
  ASSERT_EQ(timings.size(), 2u);
  EXPECT_GE(timings[0].median_us, 400);
  EXPECT_GE(timings[1].median_us, 200);
  EXPECT_LT(timings[1].median_us, timings[0].median_us);
  EXPECT_GE(timings[0].samples_us.size(), 3u);
  EXPECT_EQ(timings[0].samples_us.size(), timings[1].samples_us.size());
  EXPECT_FALSE(find_measured(key_).has_value());
}

TEST_F(Autotuner, TimesOnTheGpu) {
  if (!cuda_absence().empty()) GTEST_SKIP() << cuda_absence();
  const Device device{DeviceKind::kCuda, 0};
  OwnContext context(device);
  constexpr size_t kBytes = 64 << 20;
  void* source = cuda_device::allocate(0, kBytes);
  void* target = cuda_device::allocate(0, kBytes);
  Candidate whole, half;
  whole.kernel = "whole";
  whole.run = [=](int) { cuda_device::copy_on_device(0, target, source, kBytes, nullptr); };
  half.kernel = "quarter";
  half.run = [=](int) { cuda_device::copy_on_device(0, target, source, kBytes / 4, nullptr); };
  const TuneReport report = autotune(key_, {whole, half}, context, {});
  cuda_device::release(0, source);
  cuda_device::release(0, target);
  ASSERT_EQ(report.rows.size(), 2u);
  EXPECT_EQ(report.rows[0].kernel, "quarter");
  EXPECT_GT(report.rows[0].median_us, 1);
}

}  // namespace
}  // namespace kernel_pytorch::tuning
