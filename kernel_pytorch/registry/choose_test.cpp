#include "kernel_pytorch/registry/choose.h"

#include <gtest/gtest.h>

#include <atomic>
#include <thread>

#include "kernel_pytorch/registry/erase.h"
#include "kernel_pytorch/registry/toy_operation_test.h"
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
  static void expect_words(const std::string& text, std::initializer_list<std::string> words) {
    for (const std::string& word : words) EXPECT_NE(text.find(word), std::string::npos) << word << " not in: " << text;
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
  expect_words(message_of(chosen_by("fastest", make_problem()), ErrorCode::kInvalidArgument),
               {"toy_good", "\"fastest\"", "future, aligned, plain, reference"});
  expect_words(message_of(chosen_by("aligned wait=7", make_problem()), ErrorCode::kInvalidArgument),
               {"\"wait=7\"", "wait=400, wait=0"});
  expect_words(message_of(chosen_by("aligned", make_problem(4, 32, 1)), ErrorCode::kUnsupported),
               {"aligned", "x must be 16-byte aligned"});
}

TEST_F(Choose, TheErrorTierGivesEveryReason) {
  OwnContext context;
  const Problem problem = make_problem();
  expect_words(message_of([&] { choose(toy::kNone, problem, context); }, ErrorCode::kUnsupported),
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
    expect_words(message_of([&] { choose_good(make_problem()); }, ErrorCode::kInvalidArgument), {"an overlay", word});
    tuning::pop_overlay(wrong);
  }
}

TEST_F(Choose, AutotuneMeasuresOnceAndIsThenMemory) {
  tuning::push_autotune();
  const Problem problem = make_problem(8, 64);
  OwnContext context;
  expect(choose(toy::kMixed, problem, context), "aligned", 1, Tier::kAutotune);
  for (int i = 0; i < 2; ++i) expect(choose(toy::kMixed, problem, context), "aligned", 1, Tier::kMemory);
  tuning::pop_autotune();
  expect(choose(toy::kMixed, problem, context), "aligned", 1, Tier::kMemory);
  EXPECT_EQ(tuning::list_store().size(), 1u);
  for (float value : output_) EXPECT_EQ(value, 0) << "tuning works on memory of its own";
}

TEST_F(Choose, AutotuneThatFindsNothingLeavesItToTheHeuristic) {
  tuning::push_autotune();
  const Problem problem = make_problem(8, 64);
  OwnContext context;
  const auto start = std::chrono::steady_clock::now();
  expect(choose(toy::kFailing, problem, context), "wrong", 0, Tier::kHeuristic);
  for (int i = 0; i < 1000; ++i) expect(choose(toy::kFailing, problem, context), "wrong", 0, Tier::kHeuristic);
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(5)) << "it does not try again at each call";
  tuning::pop_autotune();
  EXPECT_TRUE(tuning::list_store().empty());
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
