#include "kernel_pytorch/device/cpu/thread_pool.h"

#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <numeric>
#include <stdexcept>
#include <thread>
#include <vector>

#include "kernel_pytorch/base/emulation_test.h"
#include "kernel_pytorch/base/options.h"
#include "kernel_pytorch/device/parallel.h"

#if defined(__SANITIZE_THREAD__)
// TSan refuses threads in the child of a fork() of many threads by default; that is what we test.
extern "C" const char* __tsan_default_options() {
  return "die_after_fork=0";
}
#endif

namespace kernel_pytorch::cpu_device {
namespace {

std::vector<int> calls_per_worker(Threads& threads, int workers) {
  struct Shared {
    std::vector<std::atomic<int>> calls;
  } shared{std::vector<std::atomic<int>>(workers)};
  threads.run(
      workers, [](void* state, int worker) { ++static_cast<Shared*>(state)->calls[worker]; }, &shared);
  return {shared.calls.begin(), shared.calls.end()};
}

TEST(ThreadPool, EveryWorkerIsCalledOnce) {
  Threads& threads = own_threads();
  ASSERT_GE(threads.count(), 1);
  for (int round = 0; round < 300; ++round) {
    for (int workers : {0, 1, 2, threads.count(), 5 * threads.count() + 1}) {
      EXPECT_EQ(calls_per_worker(threads, workers), std::vector<int>(workers, 1));
    }
  }
}

TEST(ThreadPool, TheCallerTakesPartAndOthersHelp) {
  if (own_threads().count() < 2) GTEST_SKIP() << "one core";
  // Two tasks that wait for each other end only if two threads run them at once.
  std::atomic<int> arrived{0};
  std::thread::id ids[2];
  parallel_for(&own_threads(), 2, [&](int64_t i) {
    ids[i] = std::this_thread::get_id();
    ++arrived;
    while (arrived.load() < 2) std::this_thread::yield();
  });
  EXPECT_NE(ids[0], ids[1]);
  EXPECT_TRUE(ids[0] == std::this_thread::get_id() || ids[1] == std::this_thread::get_id());
}

TEST(ParallelFor, EveryTaskOnce) {
  for (int64_t tasks : {0, 1, 2, 3, 17, 1000, 50000}) {
    std::vector<std::atomic<int>> done(tasks);
    parallel_for(&own_threads(), tasks, [&](int64_t i) { ++done[i]; });
    for (const std::atomic<int>& times : done) ASSERT_EQ(times.load(), 1);
    std::vector<int> alone(tasks);
    parallel_for(nullptr, tasks, [&](int64_t i) { ++alone[i]; });
    for (int times : alone) ASSERT_EQ(times, 1);
  }
}

TEST(ParallelFor, WritesOfTasksAreSeenAfterwards) {
  std::vector<int64_t> values(10000);  // plain memory: TSan checks that run() orders it
  for (int round = 0; round < 50; ++round) {
    parallel_for(&own_threads(), 10000, [&](int64_t i) { values[i] = i + round; });
    ASSERT_EQ(std::accumulate(values.begin(), values.end(), int64_t{0}), 49995000 + 10000 * round);
  }
}

TEST(ParallelFor, NestedRunsInlineAndEnds) {
  std::atomic<int> inner_tasks{0};
  parallel_for(&own_threads(), 8, [&](int64_t) {
    const std::thread::id outer = std::this_thread::get_id();
    parallel_for(&own_threads(), 16, [&](int64_t) {
      EXPECT_EQ(std::this_thread::get_id(), outer);
      ++inner_tasks;
    });
  });
  EXPECT_EQ(inner_tasks.load(), 128);
}

TEST(ParallelFor, ManyCallersAtOnce) {
  std::vector<std::thread> callers;
  std::atomic<int64_t> total{0};
  for (int caller = 0; caller < 8; ++caller) {
    callers.emplace_back([&] {
      for (int round = 0; round < 100; ++round) {
        std::atomic<int64_t> sum{0};
        parallel_for(&own_threads(), 64, [&](int64_t i) { sum += i; });
        EXPECT_EQ(sum.load(), 2016);
        total += sum.load();
      }
    });
  }
  for (std::thread& caller : callers) caller.join();
  EXPECT_EQ(total.load(), 8 * 100 * 2016);
}

TEST(ParallelFor, AnExceptionReachesTheCallerAndThePoolGoesOn) {
  for (int round = 0; round < 50; ++round) {
    std::atomic<int> ran{0};
    const auto throw_at_ten = [&](int64_t i) {
      ++ran;
      if (i == 10) throw std::runtime_error("task ten");
    };
    try {
      parallel_for(&own_threads(), 1000000, throw_at_ten);
      FAIL() << "no exception";
    } catch (const std::runtime_error& error) {
      EXPECT_STREQ(error.what(), "task ten");
    }
    EXPECT_LT(ran.load(), 1000000) << "the remaining tasks are dropped";
  }
  EXPECT_THROW(parallel_for(&own_threads(), 64, [](int64_t) { throw std::runtime_error("all"); }), std::runtime_error);
  EXPECT_EQ(calls_per_worker(own_threads(), 4), std::vector<int>(4, 1));
}

bool pool_works() {
  std::atomic<int64_t> sum{0};
  for (int round = 0; round < 20; ++round) parallel_for(&own_threads(), 100, [&](int64_t i) { sum += i; });
  return sum.load() == 20 * 4950;
}

TEST(ThreadPool, SurvivesFork) {
  Threads& before_fork = own_threads();
  ASSERT_TRUE(pool_works());
  for (int round = 0; round < 5; ++round) {
    const pid_t child = fork_and_run([&] {
      alarm(60);                                              // a hang is a failure, not a hang
      const bool same_face = &own_threads() == &before_fork;  // a context made before fork() still points to it
      if (!same_face || !pool_works()) return 1;
      const pid_t grandchild = fork_and_run([] { return pool_works() ? 0 : 1; });
      int status = 1;
      return waitpid(grandchild, &status, 0) == grandchild && status == 0 ? 0 : 1;
    });
    ASSERT_GE(child, 0);
    int status = 1;
    ASSERT_EQ(waitpid(child, &status, 0), child);
    EXPECT_EQ(status, 0);
    EXPECT_TRUE(pool_works()) << "in the parent";
  }
}

TEST(ThreadPool, ForkWhileOtherThreadsUseThePool) {
  std::atomic<bool> stop{false};
  std::thread busy([&] {
    while (!stop.load()) pool_works();
  });
  for (int round = 0; round < 10; ++round) {
    const pid_t child = fork_and_run([] {
      alarm(60);
      return pool_works() ? 0 : 1;
    });
    ASSERT_GE(child, 0);
    int status = 1;
    ASSERT_EQ(waitpid(child, &status, 0), child);
    EXPECT_EQ(status, 0) << "round " << round;
  }
  stop = true;
  busy.join();
}

TEST(ThreadPool, ThreadsSleepWhenThereIsNothingToDo) {
  ASSERT_TRUE(pool_works());
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  const auto cpu_milliseconds = [] {
    rusage usage{};
    getrusage(RUSAGE_SELF, &usage);
    return (usage.ru_utime.tv_sec + usage.ru_stime.tv_sec) * 1000.0 +
           (usage.ru_utime.tv_usec + usage.ru_stime.tv_usec) / 1000.0;
  };
  const double before = cpu_milliseconds();
  std::this_thread::sleep_for(std::chrono::milliseconds(200));
  EXPECT_LT(cpu_milliseconds() - before, 50) << "one spinning thread would use 200 ms";
}

TEST(ThreadPool, WidthComesFromTheOptions) {
  const pid_t child = fork_and_run([] {  // a new process has a new pool
    alarm(60);
    Options wide = options();
    wide.threads = 7;
    set_options_for_process(wide);
    return own_threads().count() == 7 && calls_per_worker(own_threads(), 7) == std::vector<int>(7, 1) ? 0 : 1;
  });
  ASSERT_GE(child, 0);
  int status = 1;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
}

}  // namespace
}  // namespace kernel_pytorch::cpu_device
