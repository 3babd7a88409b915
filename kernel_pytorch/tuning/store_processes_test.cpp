// Many processes on one store: none of their rows may be lost, and a process killed at any moment leaves it sound.
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <thread>

#include "kernel_pytorch/tuning/temporary_store_test.h"

namespace kernel_pytorch::tuning {
namespace {

constexpr int kProcesses = 16;
constexpr int kRowsEach = 8;
const int kKills = unless_emulated(50, 10);

class StoreProcesses : public TemporaryStore {};

std::string test_argument() {
  return environment("KP_TEST_ARGUMENT");
}

TEST(StoreProcessesChild, DISABLED_WriteSomeRows) {
  for (int i = 0; i < kRowsEach; ++i)
    remember(make_test_key(test_argument() + concat("_", i)), make_test_measurement());
}

// Reports each row once it is remembered; the parent kills it sooner or later.
TEST(StoreProcessesChild, DISABLED_WriteWithoutEnd) {
  for (int i = 0; i < 1000000; ++i) {
    remember(make_test_key(concat(test_argument(), "_", i)), make_test_measurement());
    const std::string line = concat("\nrow ", i, "\n");
    if (write(STDOUT_FILENO, line.data(), line.size()) < 0) return;
  }
}

TEST_F(StoreProcesses, SixteenWriteAtOnceAndNoneIsLost) {
  std::vector<Child> children;
  for (int i = 0; i < kProcesses; ++i) {
    children.push_back(start_child("StoreProcessesChild.DISABLED_WriteSomeRows", root() + "/cache", concat("p", i)));
  }
  for (Child& child : children) EXPECT_EQ(wait_for(child), 0);
  EXPECT_EQ(list_store().size(), static_cast<size_t>(kProcesses * kRowsEach));
  EXPECT_TRUE(verify_store().empty());
}

TEST_F(StoreProcesses, SixteenFindADamagedStoreAtOnceAndNoneIsLost) {
  std::filesystem::create_directories(root() + "/cache");
  std::FILE* damaged = std::fopen(file().c_str(), "w");
  std::fputs("this was never a database, and sixteen processes will find out at the same time", damaged);
  std::fclose(damaged);
  std::vector<Child> children;
  for (int i = 0; i < kProcesses; ++i) {
    children.push_back(start_child("StoreProcessesChild.DISABLED_WriteSomeRows", root() + "/cache", concat("p", i)));
  }
  for (Child& child : children) EXPECT_EQ(wait_for(child), 0);
  EXPECT_EQ(list_store().size(), static_cast<size_t>(kProcesses * kRowsEach));
  EXPECT_TRUE(std::filesystem::exists(file() + ".damaged-1"));
  EXPECT_FALSE(std::filesystem::exists(file() + ".damaged-2"));
}

int last_reported_row(const std::string& output) {
  const size_t end = output.rfind('\n');
  const size_t begin = output.rfind("row ", end);
  return begin == std::string::npos ? -1 : std::atoi(output.c_str() + begin + 4);
}

TEST_F(StoreProcesses, KilledInTheMiddleOfWritingManyTimes) {
  std::mt19937 generator(7);
  size_t expected_at_least = 0;
  for (int kill_number = 0; kill_number < kKills; ++kill_number) {
    Child child =
        start_child("StoreProcessesChild.DISABLED_WriteWithoutEnd", root() + "/cache", concat("k", kill_number));
    std::string output;
    char buffer[4096];
    // The first row is written; somewhere in the middle of the following ones the process dies.
    while (last_reported_row(output) < 0) {
      const ssize_t n = read(child.output, buffer, sizeof(buffer));
      ASSERT_GT(n, 0) << output;
      output.append(buffer, static_cast<size_t>(n));
    }
    std::this_thread::sleep_for(std::chrono::microseconds(generator() % 20000));
    kill(child.pid, SIGKILL);
    for (ssize_t n; (n = read(child.output, buffer, sizeof(buffer))) > 0;)
      output.append(buffer, static_cast<size_t>(n));
    wait_for(child);
    expected_at_least += static_cast<size_t>(last_reported_row(output) + 1);
  }
  EXPECT_TRUE(verify_store().empty());
  EXPECT_GE(list_store().size(), expected_at_least);
  EXPECT_LE(list_store().size(), expected_at_least + static_cast<size_t>(kKills));  // at most the one each was at
  EXPECT_FALSE(std::filesystem::exists(file() + ".damaged-1"));
}

TEST_F(StoreProcesses, AForkedChildReadsAndWrites) {
#ifdef __SANITIZE_THREAD__
  GTEST_SKIP() << "ThreadSanitizer does not follow threads that a forked child starts";
#endif
  remember(make_test_key("parent"), make_test_measurement());
  const pid_t child = fork_and_run([] {
    const bool inherited = find_measured(make_test_key("parent"))->tier == Tier::kMemory;
    remember(make_test_key("child"), make_test_measurement());
    forget_memory();
    const bool read_back = anything_to_consult() && find_measured(make_test_key("child")).has_value();
    return inherited && read_back ? 0 : 1;
  });
  int status = 0;
  waitpid(child, &status, 0);
  EXPECT_EQ(status, 0);
  forget_memory();
  EXPECT_TRUE(find_measured(make_test_key("child")).has_value());
}

// Forks while other threads hold the locks of tuning most of the time.
TEST_F(StoreProcesses, ForkedChildrenNeverFindALockHeld) {
#if defined(__SANITIZE_THREAD__)
  GTEST_SKIP() << "ThreadSanitizer does not follow threads that a forked child starts";
#elif defined(__SANITIZE_ADDRESS__)
  GTEST_SKIP() << "AddressSanitizer of g++ 12 forks without its allocator's locks: a child may wait for one for ever";
#endif
  std::atomic<bool> stop{false};
  std::thread busy([&] {
    for (int i = 0; !stop; ++i) {
      remember(make_test_key(concat("busy", i % 10)), make_test_measurement());
      if (is_emulated()) std::this_thread::sleep_for(std::chrono::milliseconds(5));  // else a fork waits over a second
    }
  });
  int failures = 0;
  for (int i = 0; i < 20; ++i) {
    const pid_t child = fork_and_run([&] {
      alarm(20);
      remember(make_test_key(concat("child", i)), make_test_measurement());
      return find_measured(make_test_key(concat("child", i))).has_value() ? 0 : 1;
    });
    int status = 0;
    waitpid(child, &status, 0);
    failures += status != 0;
  }
  stop = true;
  busy.join();
  EXPECT_EQ(failures, 0);
  const auto is_childs = [](const StoredMeasurement& row) { return row.key.problem.starts_with("child"); };
  EXPECT_EQ(std::ranges::count_if(list_store(), is_childs), 20);
}

}  // namespace
}  // namespace kernel_pytorch::tuning
