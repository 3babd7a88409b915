#include "kernel_pytorch/base/log.h"

#include <atomic>
#include <cstdio>
#include <mutex>
#include <set>

#include "kernel_pytorch/base/options.h"

namespace kernel_pytorch {
namespace {

constexpr std::string_view kLevelNames[] = {"error", "warning", "info", "debug"};

std::atomic<void (*)(LogLevel, std::string_view)> log_sink{nullptr};

}  // namespace

bool log_enabled(LogLevel level) {
  const std::string& wanted = options().log_level;
  for (int i = 0; i < 4; ++i) {
    if (kLevelNames[i] == wanted) return static_cast<int>(level) <= i;
  }
  return level <= LogLevel::kWarning;
}

void log_line(LogLevel level, std::string_view message) {
  if (auto* sink = log_sink.load()) return sink(level, message);
  const std::string line = concat("kernel_pytorch: ", kLevelNames[static_cast<int>(level)], ": ", message, "\n");
  std::fwrite(line.data(), 1, line.size(), stderr);  // one write, so lines of several threads do not mix
}

void log_once(LogLevel level, std::string_view key, std::string_view message) {
  static std::mutex mutex;
  static std::set<std::string, std::less<>>* seen = new std::set<std::string, std::less<>>;
  {
    const std::lock_guard lock(mutex);
    if (!seen->emplace(key).second) return;
  }
  if (log_enabled(level)) log_line(level, message);
}

void set_log_sink(void (*sink)(LogLevel, std::string_view)) {
  log_sink.store(sink);
}

}  // namespace kernel_pytorch
