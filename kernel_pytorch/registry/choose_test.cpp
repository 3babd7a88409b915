#include "kernel_pytorch/registry/choose.h"

#include <gtest/gtest.h>

#include <atomic>
#include <thread>

#include "kernel_pytorch/registry/erase.h"
#include "kernel_pytorch/registry/toy_operation_test.h"
#include "kernel_pytorch/tuning/autotune_scope.h"
#include "kernel_pytorch/tuning/temporary_store_test.h"

namespace kernel_pytorch::registry {
namespace {

using toy::Problem;
using tuning::Tier;

class Choose : public tuning::TemporaryStore {
 protected:
  Problem make_problem(int64_t rows = 4, int64_t columns = 32, int64_t misaligned_by = 0) {
    Problem problem;
    problem.x = contiguous_view(x_ + misaligned_by, DType::kFloat32, {rows, columns});
    problem.output = contiguous_view(output_, DType::kFloat32, {rows, columns});
    return problem;
  }
  Choice<Problem> choose_good(const Problem& problem, std::string_view kernel_override = {}) {
    OwnContext context;
    context->kernel_override = kernel_override;
    return choose(toy::kGood, problem, context);
  }
  static tuning::Key key_of(const Operation<Problem>& operation, const Problem& problem) {
    return make_key(BorrowedProblem<Problem>(operation, problem, device_info({})));
  }
  static void expect(const Choice<Problem>& choice, std::string_view kernel, int config, Tier tier) {
    ASSERT_NE(choice.kernel, nullptr);
    EXPECT_EQ(choice.kernel->name, kernel);
    EXPECT_EQ(choice.config, config);
    EXPECT_EQ(tuning::name_of(choice.tier), tuning::name_of(tier));
  }
  static std::string message_of(const auto& action, ErrorCode code) {
    try {
      action();
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), code);
      return error.message();
    }
    return "(nothing was thrown)";
  }
  static void expect_mentions(const std::string& text, std::initializer_list<std::string> mentions) {
    for (const std::string& word : mentions)
      EXPECT_NE(text.find(word), std::string::npos) << word << " not in: " << text;
  }
  static void remember(const tuning::Key& key, const std::string& kernel, const std::string& config) {
    tuning::remember(key, {kernel, config, 5, 0.1, tuning::utc_now(), "0.0.1"});
  }

  alignas(64) float x_[64 * 64] = {};
  alignas(64) float output_[64 * 64] = {};
};

TEST_F(Choose, TheFirstKernelThatSupportsTheProblem) {
  expect(choose_good(make_problem()), "aligned", 0, Tier::kHeuristic);
  expect(choose_good(make_problem(4, 32, 1)), "plain", 0, Tier::kHeuristic);
}

TEST_F(Choose, AnOverrideNamesKernelAndConfig) {
  expect(choose_good(make_problem(), "plain"), "plain", 0, Tier::kOverride);
  expect(choose_good(make_problem(), "aligned"), "aligned", 0, Tier::kOverride);
  expect(choose_good(make_problem(), "aligned wait=0"), "aligned", 1, Tier::kOverride);
}

TEST_F(Choose, AWrongOverrideIsAnErrorThatNamesWhatThereIs) {
  const auto chosen_by = [&](std::string_view text, Problem problem) {
    return [=, this] { choose_good(problem, text); };
  };
  expect_mentions(message_of(chosen_by("fastest", make_problem()), ErrorCode::kInvalidArgument),
                  {"toy_good", "\"fastest\"", "future, aligned, plain, reference"});
  expect_mentions(message_of(chosen_by("aligned wait=7", make_problem()), ErrorCode::kInvalidArgument),
                  {"\"wait=7\"", "wait=400, wait=0"});
  expect_mentions(message_of(chosen_by("aligned", make_problem(4, 32, 1)), ErrorCode::kUnsupported),
                  {"aligned", "x must be 16-byte aligned"});
}

TEST_F(Choose, TheErrorTierGivesEveryReason) {
  OwnContext context;
  const Problem problem = make_problem();
  expect_mentions(message_of([&] { choose(toy::kNone, problem, context); }, ErrorCode::kUnsupported),
                  {"toy_none", "future: needs a machine of the future", "rows=4 columns=32 dtype=fp32", "cpu"});
}

TEST_F(Choose, TiersInOrder) {
  const Problem problem = make_problem();
  const tuning::Key key = key_of(toy::kGood, problem);
  expect(choose_good(problem), "aligned", 0, Tier::kHeuristic);
  remember(key, "aligned", "wait=0");
  for (int i = 0; i < 3; ++i) expect(choose_good(problem), "aligned", 1, Tier::kMemory);
  tuning::forget_memory();
  for (int i = 0; i < 3; ++i) expect(choose_good(problem), "aligned", 1, Tier::kPersistent);
  const int64_t overlay = tuning::push_overlay({{"toy_good", "", "reference", ""}});
  for (int i = 0; i < 3; ++i) expect(choose_good(problem), "reference", 0, Tier::kOverlay);
  expect(choose_good(problem, "plain"), "plain", 0, Tier::kOverride);
  tuning::pop_overlay(overlay);
  for (int i = 0; i < 3; ++i) expect(choose_good(problem), "aligned", 1, Tier::kPersistent);
  tuning::clear_store();
  expect(choose_good(problem), "aligned", 0, Tier::kHeuristic);
}

TEST_F(Choose, AMeasurementCountsForItsBucketAlone) {
  remember(key_of(toy::kGood, make_problem(30, 32)), "plain", "");
  expect(choose_good(make_problem(32, 32)), "plain", 0, Tier::kMemory);  // 30 and 32 rows share a bucket
  expect(choose_good(make_problem(33, 32)), "aligned", 0, Tier::kHeuristic);
  expect(choose_good(make_problem(32, 16)), "aligned", 0, Tier::kHeuristic);
}

TEST_F(Choose, WhatIsRememberedButCannotBeUsedIsAMiss) {
  const Problem problem = make_problem();
  const tuning::Key key = key_of(toy::kGood, problem);
  remember(key, "removed_kernel", "");
  for (int i = 0; i < 2; ++i) expect(choose_good(problem), "aligned", 0, Tier::kHeuristic);
  remember(key, "aligned", "wait=123456");
  for (int i = 0; i < 2; ++i) expect(choose_good(problem), "aligned", 0, Tier::kHeuristic);
  remember(key, "future", "");
  for (int i = 0; i < 2; ++i) expect(choose_good(problem), "aligned", 0, Tier::kHeuristic);
}

TEST_F(Choose, AMisalignedProblemPassesOverWhatItsKeyRemembers) {
  remember(key_of(toy::kGood, make_problem()), "aligned", "wait=0");
  for (int i = 0; i < 2; ++i) {
    expect(choose_good(make_problem(4, 32, 1)), "plain", 0, Tier::kHeuristic);
    expect(choose_good(make_problem()), "aligned", 1, Tier::kMemory);
  }
}

TEST_F(Choose, AnOverlayMayNameAProblemAndAConfig) {
  const int64_t overlay = tuning::push_overlay({{"toy_good", "rows=4 columns=32 dtype=fp32", "aligned", "wait=0"}});
  expect(choose_good(make_problem()), "aligned", 1, Tier::kOverlay);
  expect(choose_good(make_problem(5)), "aligned", 0, Tier::kHeuristic);
  expect(choose_good(make_problem(4, 32, 1)), "plain", 0, Tier::kHeuristic);  // passed over: misaligned
  tuning::pop_overlay(overlay);
  for (const auto& [kernel, config, word] : {std::tuple{"fastest", "", "future, aligned, plain, reference"},
                                             std::tuple{"aligned", "wait=7", "wait=400, wait=0"}}) {
    const int64_t wrong = tuning::push_overlay({{"toy_good", "", kernel, config}});
    expect_mentions(message_of([&] { choose_good(make_problem()); }, ErrorCode::kInvalidArgument),
                    {"an overlay", word});
    tuning::pop_overlay(wrong);
  }
}

TEST_F(Choose, AutotuneMeasuresOnceAndIsThenMemory) {
  const int64_t scope = tuning::push_autotune();
  const Problem problem = make_problem(8, 64);
  OwnContext context;
  expect(choose(toy::kMixed, problem, context), "aligned", 1, Tier::kAutotune);
  for (int i = 0; i < 2; ++i) expect(choose(toy::kMixed, problem, context), "aligned", 1, Tier::kMemory);
  tuning::pop_autotune(scope);
  expect(choose(toy::kMixed, problem, context), "aligned", 1, Tier::kMemory);
  EXPECT_EQ(tuning::list_store().size(), 1u);
  for (float value : output_) EXPECT_EQ(value, 0) << "tuning works on memory of its own";
}

TEST_F(Choose, AutotuneThatFindsNothingLeavesItToTheHeuristic) {
  const int64_t scope = tuning::push_autotune();
  const Problem problem = make_problem(8, 64);
  OwnContext context;
  const auto start = std::chrono::steady_clock::now();
  expect(choose(toy::kFailing, problem, context), "wrong", 0, Tier::kHeuristic);
  for (int i = 0; i < 1000; ++i) expect(choose(toy::kFailing, problem, context), "wrong", 0, Tier::kHeuristic);
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(5)) << "it does not try again at each call";
  const tuning::ScopeReport report = tuning::pop_autotune(scope);
  EXPECT_TRUE(report.tuned.empty());
  ASSERT_EQ(report.untuned.size(), 1u);
  expect_mentions(report.untuned[0].reason, {"no candidate was right"});
  EXPECT_TRUE(tuning::list_store().empty());
}

TEST_F(Choose, AScopeReportsWhatItMeasured) {
  const int64_t scope = tuning::push_autotune();
  const Problem problem = make_problem(8, 64);
  OwnContext context;
  choose(toy::kMixed, problem, context);
  const tuning::ScopeReport report = tuning::pop_autotune(scope);
  ASSERT_EQ(report.tuned.size(), 1u);
  const tuning::TunedProblem& tuned = report.tuned[0];
  EXPECT_EQ(tuned.key, key_of(toy::kMixed, problem));
  const Choice<Problem> untuned = choose_by_heuristic(toy::kMixed, problem, *context->info);
  EXPECT_EQ(tuned.before.kernel, untuned.kernel->name);
  EXPECT_EQ(tuned.after.kernel, "aligned");
  EXPECT_EQ(tuned.after.config, "wait=0");
  EXPECT_GT(tuned.after.median_us, 0);
  EXPECT_TRUE(tuned.complete);
  EXPECT_GT(tuned.seconds, 0);
  EXPECT_EQ(tuned.seconds, report.seconds);
}

TEST_F(Choose, AScopeThatRemembersNothingLeavesEveryChoiceAsItWas) {
  const int64_t scope = tuning::push_autotune({.remembers = false});
  const Problem problem = make_problem(8, 64);
  for (int i = 0; i < 3; ++i) expect(choose_good(problem), "aligned", 0, Tier::kHeuristic);
  const tuning::ScopeReport report = tuning::pop_autotune(scope);
  ASSERT_EQ(report.tuned.size(), 1u) << "once";
  EXPECT_EQ(report.tuned[0].before.config, "wait=400");
  EXPECT_EQ(report.tuned[0].after.config, "wait=0");
  EXPECT_LT(report.tuned[0].after.median_us, report.tuned[0].before.median_us);
  expect(choose_good(problem), "aligned", 0, Tier::kHeuristic);
  EXPECT_TRUE(tuning::list_store().empty());
  EXPECT_FALSE(tuning::anything_to_consult());
}

TEST(TunedProblem, GainsWhereTheDifferenceExceedsBothSpreads) {
  const auto gains = [](double before, double after, double spread, int samples = 20) {
    tuning::TunedProblem tuned;
    tuned.before.median_us = before, tuned.after.median_us = after;
    tuned.before.spread_us = tuned.after.spread_us = spread;
    tuned.before.samples = tuned.after.samples = samples;
    return tuned.gains();
  };
  EXPECT_TRUE(gains(400, 10, 5));
  EXPECT_FALSE(gains(400, 10, 5, 1)) << "one sample says nothing";
  EXPECT_FALSE(gains(400, 10, 300));
  EXPECT_FALSE(gains(10, 400, 5));
  EXPECT_FALSE(gains(400, 399.9, 0)) << "too little to be worth another choice";
}

TEST_F(Choose, AScopeTunesOnlyWhatItIsAskedFor) {
  const Problem wanted = make_problem(8, 64), other = make_problem(9, 64);
  const int64_t scope = tuning::push_autotune({.only = {{"toy_good", key_of(toy::kGood, wanted).problem, 5}}});
  expect(choose_good(other), "aligned", 0, Tier::kHeuristic);
  expect(choose_good(wanted), "aligned", 1, Tier::kAutotune);
  const tuning::ScopeReport report = tuning::pop_autotune(scope);
  EXPECT_EQ(report.tuned.size(), 1u);
  EXPECT_TRUE(report.untuned.empty());  // what was not asked for is not missed
}

TEST_F(Choose, ASpentBudgetLeavesTheRestUntunedAndNamesIt) {
  const int64_t scope = tuning::push_autotune({.budget_seconds = 0.1});
  const auto start = std::chrono::steady_clock::now();
  int tuned = 0;
  for (int rows = 1; rows <= 16; ++rows) tuned += choose_good(make_problem(rows, 64)).tier == Tier::kAutotune;
  const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  const tuning::ScopeReport report = tuning::pop_autotune(scope);
  EXPECT_GE(tuned, 1);
  EXPECT_LT(tuned, 16);
  EXPECT_EQ(static_cast<int>(report.tuned.size()), tuned);
  EXPECT_EQ(report.tuned.size() + report.untuned.size(), 16u);
  expect_mentions(report.untuned.back().reason, {"the budget of 0.1 s was spent"});
  EXPECT_EQ(report.untuned.back().key, key_of(toy::kGood, make_problem(16, 64)));
  EXPECT_LE(report.seconds, seconds);
  EXPECT_LT(seconds, 3.0) << "sixteen problems would take longer; a busy machine may pause the one that is tuned";
}

TEST_F(Choose, AnInterruptedScopeTunesNoMore) {
  int asked = 0, calls = 0;
  const int64_t scope = tuning::push_autotune({.progress =
                                                   [&](const tuning::ScopeProgress& now) {
                                                     ++calls;
                                                     EXPECT_EQ(now.key.op, "toy_good");
                                                     EXPECT_GT(now.seconds, 0);
                                                     EXPECT_GT(now.problem.total, 0);
                                                   },
                                               .interrupted = [&] { return ++asked > 1; }});
  choose_good(make_problem(8, 64));
  const int calls_before = calls;
  expect(choose_good(make_problem(9, 64)), "aligned", 0, Tier::kHeuristic);
  const tuning::ScopeReport report = tuning::pop_autotune(scope);
  EXPECT_EQ(report.tuned.size(), 1u);
  ASSERT_EQ(report.untuned.size(), 1u);
  expect_mentions(report.untuned[0].reason, {"interrupted"});
  EXPECT_GE(calls_before, 1);
  EXPECT_EQ(calls, calls_before);
}

TEST_F(Choose, AScopePoppedWhileItTunesEndsThatAndIsToldNoMore) {
  int64_t scope = 0;
  int calls = 0;
  scope = tuning::push_autotune({.progress = [&](const tuning::ScopeProgress&) {
    ++calls;
    tuning::pop_autotune(scope);
  }});
  choose_good(make_problem(8, 64));
  EXPECT_EQ(calls, 1);
  EXPECT_FALSE(tuning::autotune_enabled());
}

TEST_F(Choose, OneKernelWithOneConfigIsNotTuned) {
  const int64_t scope = tuning::push_autotune();
  expect(choose_good(make_problem(8, 64, 1)), "plain", 0, Tier::kHeuristic);  // the reference is no rival
  EXPECT_TRUE(tuning::pop_autotune(scope).tuned.empty());
}

TEST_F(Choose, RecordsWhatWasDecidedInEachTier) {
  tuning::set_recording(true);
  const Problem problem = make_problem();
  choose_good(problem);
  choose_good(problem);
  choose_good(problem, "plain");
  remember(key_of(toy::kGood, problem), "aligned", "wait=0");
  choose_good(problem);
  tuning::set_recording(false);
  choose_good(problem);
  const auto decisions = tuning::recorded();
  ASSERT_EQ(decisions.size(), 3u);
  EXPECT_EQ(decisions[0].config, "wait=400");
  EXPECT_EQ(decisions[0].count, 2);
  EXPECT_EQ(decisions[0].candidates, 3);  // aligned with two configs, plain; not the reference
  EXPECT_EQ(decisions[0].bytes, 2 * 4 * 32 * 4);
  EXPECT_EQ(decisions[1].tier, Tier::kOverride);
  EXPECT_EQ(decisions[2].tier, Tier::kMemory);
  EXPECT_EQ(decisions[2].config, "wait=0");
  EXPECT_EQ(decisions[2].key, key_of(toy::kGood, problem));
}

TEST_F(Choose, ExplainShowsEveryCandidateAndTheTier) {
  const AnyOperation any = erase(toy::kGood);
  const ProblemRequest request{{4, 32}, DType::kFloat32, {}, {}};
  Explanation explanation = any.explain(request, "");
  ASSERT_EQ(explanation.candidates.size(), 4u);
  EXPECT_EQ(explanation.candidates[0].reason, "needs a machine of the future");
  EXPECT_FALSE(explanation.candidates[0].supported);
  EXPECT_EQ(explanation.candidates[1].configs, (std::vector<std::string>{"wait=400", "wait=0"}));
  EXPECT_EQ(explanation.candidates[1].heuristic_config, "wait=400");
  EXPECT_EQ(explanation.chosen_kernel, "aligned");
  EXPECT_EQ(explanation.tier, Tier::kHeuristic);
  EXPECT_EQ(explanation.measured_us, 0);
  remember(explanation.key, "aligned", "wait=0");
  explanation = any.explain(request, "");
  EXPECT_EQ(explanation.chosen_config, "wait=0");
  EXPECT_EQ(explanation.tier, Tier::kMemory);
  EXPECT_EQ(explanation.measured_us, 5);
  EXPECT_EQ(any.explain(request, "plain").tier, Tier::kOverride);
  EXPECT_THROW(any.explain(request, "fastest"), Error);
  EXPECT_TRUE(erase(toy::kNone).explain(request, "").chosen_kernel.empty());
  EXPECT_EQ(erase(toy::kNone).explain(request, "").tier, Tier::kError);
}

TEST_F(Choose, TheKernelSetChangesWithNamesAndSources) {
  const Problem problem = make_problem();
  EXPECT_NE(key_of(toy::kGood, problem).kernel_set, key_of(toy::kMixed, problem).kernel_set);
  EXPECT_EQ(key_of(toy::kGood, problem).kernel_set, key_of(toy::kGood, make_problem(9)).kernel_set);
}

TEST_F(Choose, EightThreadsChooseWhileOthersTuneAndOverlay) {
  std::atomic<int> wrong{0};
  std::vector<std::thread> threads;
  for (int t = 0; t < 8; ++t) {
    threads.emplace_back([&, t] {
      OwnContext context;
      for (int i = 0; i < 300; ++i) {
        const Problem problem = make_problem(1 + (t + i) % 16, 32, i % 2);
        const Choice<Problem> choice = choose(i % 3 == 0 ? toy::kMixed : toy::kGood, problem, context);
        if (choice.kernel == nullptr || !choice.kernel->supports(problem, *context->info)) ++wrong;
        if (choice.config < 0 || choice.config > 1) ++wrong;
        if (t == 0 && i % 50 == 0) remember(key_of(toy::kGood, problem), "aligned", "wait=0");
        if (t == 1 && i % 10 == 0) tuning::pop_overlay(tuning::push_overlay({{"toy_good", "", "plain", ""}}));
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(wrong, 0);
}

}  // namespace
}  // namespace kernel_pytorch::registry
