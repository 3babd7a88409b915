#include "kernel_pytorch/tuning/selection.h"

#include <gtest/gtest.h>

#include <chrono>
#include <thread>

#include "kernel_pytorch/tuning/autotune_scope.h"
#include "kernel_pytorch/tuning/sqlite_database.h"
#include "kernel_pytorch/tuning/temporary_store_test.h"

namespace kernel_pytorch::tuning {
namespace {

class Selection : public TemporaryStore {};

TEST_F(Selection, NothingToConsultInAFreshProcess) {
  EXPECT_FALSE(anything_to_consult());
  EXPECT_FALSE(std::filesystem::exists(file()));  // asking makes no file
}

TEST_F(Selection, EachReasonToConsultComesAndGoes) {
  const int64_t handle = push_overlay({{"toy", "", "fast", ""}});
  EXPECT_TRUE(anything_to_consult());
  pop_overlay(handle);
  EXPECT_FALSE(anything_to_consult());

  const int64_t outer = push_autotune(), inner = push_autotune();
  pop_autotune(outer);
  EXPECT_TRUE(anything_to_consult());
  EXPECT_TRUE(autotune_enabled());
  pop_autotune(inner);
  EXPECT_FALSE(anything_to_consult());
  EXPECT_FALSE(autotune_enabled());

  set_recording(true);
  EXPECT_TRUE(anything_to_consult());
  set_recording(false);
  EXPECT_FALSE(anything_to_consult());

  remember(make_test_key("n=1"), make_test_measurement());
  EXPECT_TRUE(anything_to_consult());
}

TEST_F(Selection, UnbalancedPopsAreErrors) {
  EXPECT_THROW(pop_overlay(123456), Error);
  EXPECT_THROW(pop_autotune(123456), Error);
}

TEST_F(Selection, OptionTurnsAutotuneOn) {
  Options changed = options();
  changed.autotune = true;
  set_options_for_process(changed);
  forget_memory();
  EXPECT_TRUE(anything_to_consult());
  EXPECT_TRUE(autotune_enabled());
  changed.autotune = false;
  set_options_for_process(changed);
  forget_memory();
  EXPECT_FALSE(anything_to_consult());
}

TEST_F(Selection, LaterOverlaysWinAndPopInAnyOrder) {
  const Key key = make_test_key("n=1");
  const int64_t first = push_overlay({{"toy", "", "a", ""}, {"other", "", "x", ""}});
  const int64_t second = push_overlay({{"toy", "", "b", ""}, {"toy", "n=1", "c", "unroll=1"}});
  const int64_t third = push_overlay({{"toy", "n=2", "d", ""}});
  EXPECT_EQ(find_overlay("toy", key)->kernel, "c");  // the exact problem before every problem of the same push
  EXPECT_EQ(find_overlay("toy", key)->config, "unroll=1");
  EXPECT_EQ(find_overlay("toy", make_test_key("n=2"))->kernel, "d");
  EXPECT_EQ(find_overlay("toy", make_test_key("n=3"))->kernel, "b");
  pop_overlay(second);
  EXPECT_EQ(find_overlay("toy", key)->kernel, "a");
  EXPECT_EQ(find_overlay("toy", make_test_key("n=2"))->kernel, "d");
  pop_overlay(first);
  EXPECT_FALSE(find_overlay("toy", key).has_value());
  pop_overlay(third);
}

TEST_F(Selection, AnOverlayMayBeOfOneDevice) {
  Key key = make_test_key("n=1");
  const int64_t handle = push_overlay({{"toy", "n=1", "a", "", key.device}});
  EXPECT_EQ(find_overlay("toy", key)->kernel, "a");
  key.device = "another device";
  EXPECT_FALSE(find_overlay("toy", key).has_value());
  pop_overlay(handle);
}

TEST_F(Selection, GenerationGrowsWithEveryChange) {
  uint64_t last = selection_generation();
  const auto grew = [&] {
    const uint64_t now = selection_generation();
    const bool is_new = now > last;
    last = now;
    return is_new;
  };
  const int64_t handle = push_overlay({});
  EXPECT_TRUE(grew());
  pop_overlay(handle);
  EXPECT_TRUE(grew());
  remember(make_test_key("n=1"), make_test_measurement());
  EXPECT_TRUE(grew());
  const int64_t scope = push_autotune();
  EXPECT_TRUE(grew());
  pop_autotune(scope);
  EXPECT_TRUE(grew());
  forget_memory();
  EXPECT_TRUE(grew());
}

TEST_F(Selection, MemoryTurnsPersistentForTheNextProcess) {
  const Key key = make_test_key("n=1");
  EXPECT_FALSE(find_measured(key).has_value());
  remember(key, make_test_measurement("fast", 12.5));
  ASSERT_TRUE(find_measured(key).has_value());
  EXPECT_EQ(find_measured(key)->tier, Tier::kMemory);
  forget_memory();
  EXPECT_TRUE(anything_to_consult());
  ASSERT_TRUE(find_measured(key).has_value());
  EXPECT_EQ(find_measured(key)->tier, Tier::kPersistent);
  EXPECT_EQ(find_measured(key)->measurement.kernel, "fast");
  EXPECT_EQ(find_measured(key)->measurement.median_us, 12.5);
  Key other = key;
  other.kernel_set = "ffff";
  EXPECT_FALSE(find_measured(other).has_value());
  other = key;
  other.device = "another device";
  EXPECT_FALSE(find_measured(other).has_value());
}

TEST_F(Selection, RecordsEachDistinctDecisionOnce) {
  set_recording(true);
  for (int i = 0; i < 3; ++i) record({make_test_key("n=1"), "fast", "unroll=4", Tier::kHeuristic});
  record({make_test_key("n=2"), "fast", "unroll=4", Tier::kHeuristic});
  record({make_test_key("n=1"), "fast", "unroll=4", Tier::kMemory});
  set_recording(false);
  record({make_test_key("n=9"), "fast", "", Tier::kHeuristic});
  const std::vector<Decision> decisions = recorded();
  ASSERT_EQ(decisions.size(), 3u);
  EXPECT_EQ(decisions[0].count, 3);
  EXPECT_EQ(decisions[1].key.problem, "n=2");
  EXPECT_EQ(decisions[2].tier, Tier::kMemory);
  set_recording(true);
  EXPECT_TRUE(recorded().empty());
  set_recording(false);
}

// Another connection holds the file for itself: a call waits no longer than the limit, and what arrives late counts.
TEST_F(Selection, AStoreThatDoesNotAnswerCostsACallTheLimitOnceAndIsMergedLater) {
  const Key key = make_test_key("n=1");
  remember(key, make_test_measurement());
  Database blocker(file(), OpenMode::kExisting, 1000);
  blocker.query_text("PRAGMA journal_mode=DELETE");
  blocker.execute("BEGIN EXCLUSIVE");
  forget_memory();
  const int usual_limit = store_read_limit_ms.exchange(100);
  const auto start = std::chrono::steady_clock::now();
  EXPECT_FALSE(anything_to_consult());
  const auto first_call = std::chrono::steady_clock::now() - start;
  EXPECT_GE(first_call, std::chrono::milliseconds(90));
  EXPECT_LT(first_call, std::chrono::seconds(2));
  EXPECT_FALSE(anything_to_consult());
  EXPECT_LT(std::chrono::steady_clock::now() - start - first_call, std::chrono::milliseconds(50));
  store_read_limit_ms = usual_limit;
  blocker.execute("COMMIT");
  const auto is_late = [&] { return std::chrono::steady_clock::now() - start > std::chrono::seconds(20); };
  while (!anything_to_consult() && !is_late()) std::this_thread::sleep_for(std::chrono::milliseconds(5));
  ASSERT_TRUE(find_measured(key).has_value());
  EXPECT_EQ(find_measured(key)->tier, Tier::kPersistent);
}

TEST_F(Selection, EightThreadsRememberAndAskAtOnce) {
  std::vector<std::thread> threads;
  std::atomic<int> wrong{0};
  for (int t = 0; t < 8; ++t) {
    threads.emplace_back([&, t] {
      for (int i = 0; i < 5; ++i) {
        const Key key = make_test_key(concat("n=", t, "_", i));
        remember(key, make_test_measurement());
        const auto found = find_measured(key);
        if (!found || found->measurement.kernel != "fast") ++wrong;
        const int64_t handle = push_overlay({{"toy", key.problem, "b", ""}});
        if (find_overlay("toy", key)->kernel != "b" || !anything_to_consult()) ++wrong;
        pop_overlay(handle);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(wrong, 0);
  EXPECT_EQ(list_store().size(), 40u);
}

}  // namespace
}  // namespace kernel_pytorch::tuning
