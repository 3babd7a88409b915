// Test support: a cache directory that lives as long as a test, everything the library said meanwhile, and children
// that are this very test program started anew (a fork of a program with threads is not a fair model of a process).
#pragma once

#include <fcntl.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <filesystem>
#include <iterator>
#include <mutex>
#include <sstream>
#include <string>
#include <vector>

#include "kernel_pytorch/base/emulation_test.h"
#include "kernel_pytorch/base/log.h"
#include "kernel_pytorch/base/options.h"
#include "kernel_pytorch/tuning/row_check.h"
#include "kernel_pytorch/tuning/selection.h"
#include "kernel_pytorch/tuning/selection_state.h"
#include "kernel_pytorch/tuning/store.h"

namespace kernel_pytorch::tuning {

// Before any test begins, in children too: an emulator translates SQLite while it reads the store for the first time.
constexpr int kEmulatedReadLimitMs = 20'000;
inline const bool kWaitsLonger = is_emulated() && store_read_limit_ms.exchange(kEmulatedReadLimitMs) != 0;

class TemporaryStore : public ::testing::Test {
 protected:
  void SetUp() override {
    char name[] = "/tmp/kernel_pytorch_test_XXXXXX";
    ASSERT_NE(mkdtemp(name), nullptr);
    root_ = name;
    saved_ = options();
    use_directory(root_ + "/cache");
    said().clear();
    set_log_sink([](LogLevel level, std::string_view message) {
      static std::mutex mutex;
      const std::lock_guard lock(mutex);
      if (level <= LogLevel::kWarning) said().emplace_back(message);
    });
  }
  void TearDown() override {
    set_log_sink(nullptr);
    set_options_for_process(saved_);
    forget_memory();
    std::filesystem::remove_all(root_);
  }

  void use_directory(const std::string& directory) {
    Options changed = options();
    changed.cache_directory = directory;
    changed.autotune = false;
    set_options_for_process(changed);
    forget_memory();
  }
  std::string file() const { return options().cache_directory + "/tuning.db"; }
  const std::string& root() const { return root_; }
  static std::vector<std::string>& said() {
    static auto* lines = new std::vector<std::string>;
    return *lines;
  }

 private:
  std::string root_;
  Options saved_;
};

inline Key make_test_key(const std::string& problem, const std::string& op = "toy") {
  return {"test device", op, "0123456789abcdef", problem};
}
inline Measurement make_test_measurement(const std::string& kernel = "fast", double median_us = 10) {
  return {kernel, "unroll=4", median_us, 0.5, utc_now(), "0.0.1"};
}

// Starts this program for one disabled test case, with the cache directory given; its stdout can be read from `output`.
// KP_TEST_LAUNCHER="qemu-aarch64 -cpu max" is what runs it where the kernel cannot.
struct Child {
  pid_t pid = 0;
  int output = -1;
};

inline Child start_child(const std::string& test, const std::string& cache_directory,
                         const std::string& argument = "") {
  int ends[2];
  if (pipe2(ends, O_CLOEXEC) != 0) ADD_FAILURE() << "pipe";
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_adddup2(&actions, ends[1], STDOUT_FILENO);
  std::istringstream launcher(environment("KP_TEST_LAUNCHER"));
  std::vector<std::string> words{std::istream_iterator<std::string>(launcher), {}};
  words.push_back(words.empty() ? "/proc/self/exe" : std::filesystem::read_symlink("/proc/self/exe").string());
  words.insert(words.end(), {"--gtest_filter=" + test, "--gtest_also_run_disabled_tests", "--gtest_brief=1"});
  std::vector<char*> arguments;
  for (std::string& word : words) arguments.push_back(word.data());
  arguments.push_back(nullptr);
  std::vector<std::string> settings = {"KERNEL_PYTORCH_CACHE_DIR=" + cache_directory, "KP_TEST_ARGUMENT=" + argument};
  std::vector<char*> variables;
  for (char** old = environ; *old != nullptr; ++old) {
    const std::string_view variable(*old);  // a child has a cache of its own and runs its one test in every shard
    if (!variable.starts_with("KERNEL_PYTORCH_CACHE_DIR=") && !variable.starts_with("GTEST_"))
      variables.push_back(*old);
  }
  for (std::string& setting : settings) variables.push_back(setting.data());
  variables.push_back(nullptr);
  Child child;
  if (posix_spawnp(&child.pid, words[0].c_str(), &actions, nullptr, arguments.data(), variables.data()) != 0) {
    ADD_FAILURE() << "posix_spawnp " << words[0];
  }
  posix_spawn_file_actions_destroy(&actions);
  close(ends[1]);
  child.output = ends[0];
  return child;
}

inline int wait_for(Child& child) {
  int status = 0;
  waitpid(child.pid, &status, 0);
  close(child.output);
  return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}

}  // namespace kernel_pytorch::tuning
