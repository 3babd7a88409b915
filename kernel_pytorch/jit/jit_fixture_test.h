// What the tests of this folder share: a cache directory of their own, a record of what was logged, the probe's code.
#pragma once

#include <gtest/gtest.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <functional>
#include <mutex>
#include <string>
#include <vector>

#include "kernel_pytorch/base/error.h"
#include "kernel_pytorch/base/log.h"
#include "kernel_pytorch/base/options.h"
#include "kernel_pytorch/device/device_code.h"

namespace kernel_pytorch::jit::testing {

class TemporaryDirectory {
 public:
  TemporaryDirectory() {
    std::string pattern = ::testing::TempDir() + "/kernel_pytorch_jit_XXXXXX";
    path_ = mkdtemp(pattern.data());
  }
  ~TemporaryDirectory() {
    std::error_code error;
    std::filesystem::remove_all(path_, error);
  }
  TemporaryDirectory(const TemporaryDirectory&) = delete;
  TemporaryDirectory& operator=(const TemporaryDirectory&) = delete;
  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

// Warnings logged while it lives; the log sink is a plain function, so there is one record at a time.
class WarningRecord {
 public:
  WarningRecord() {
    lines().clear();
    set_log_sink([](LogLevel level, std::string_view message) {
      const std::lock_guard lock(mutex());
      if (level <= LogLevel::kWarning) lines().emplace_back(message);
    });
  }
  ~WarningRecord() { set_log_sink(nullptr); }
  WarningRecord(const WarningRecord&) = delete;
  WarningRecord& operator=(const WarningRecord&) = delete;
  static std::vector<std::string>& lines() {
    static std::vector<std::string> lines;
    return lines;
  }

 private:
  static std::mutex& mutex() {
    static std::mutex mutex;
    return mutex;
  }
};

// An empty cache directory for each test, and the options as they were afterwards.
class CacheTest : public ::testing::Test {
 protected:
  CacheTest() : saved_(options()) {
    change([](Options&) {});
  }
  ~CacheTest() override { set_options_for_process(saved_); }

  void change(const std::function<void(Options&)>& edit) {
    Options changed = options();
    changed.cache_directory = directory_.path();
    edit(changed);
    set_options_for_process(changed);
  }
  std::string cubins() const { return directory_.path() + "/cubins"; }
  std::vector<std::string> files_ending(const std::string& suffix) const {
    std::vector<std::string> files;
    std::error_code error;
    for (const auto& item : std::filesystem::directory_iterator(cubins(), error)) {
      if (item.path().string().ends_with(suffix)) files.push_back(item.path());
    }
    return files;
  }

 private:
  Options saved_;
  TemporaryDirectory directory_;
};

inline void overwrite(const std::string& path, const std::string& bytes) {
  std::ofstream(path, std::ios::binary | std::ios::trunc) << bytes;
}

// Runs the work in a forked process and returns its result (0 to 255), or -1 when it died.
inline int run_in_child(const std::function<int()>& work) {
  const pid_t child = fork();
  if (child == 0) _exit(work());
  int status = 0;
  waitpid(child, &status, 0);
  return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

inline constexpr const char* kProbeSource = "kernel_pytorch/jit/jit_probe.cuh";

inline DeviceCode scale_code(const std::string& type, int threads, int addend, int minimum_capability = 80,
                             bool architecture_specific = false) {
  return {.source = kProbeSource,
          .entry = concat("kernel_pytorch::jit_probe::scale<", type, ", kernel_pytorch::jit_probe::ProbeConfig{",
                          threads, ", ", addend, "}>"),
          .minimum_capability = minimum_capability,
          .architecture_specific = architecture_specific};
}

template <class Work>
std::string error_of(const Work& work) {
  try {
    work();
  } catch (const Error& error) {
    return error.message();
  }
  return "";
}

}  // namespace kernel_pytorch::jit::testing
