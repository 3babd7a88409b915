#include "kernel_pytorch/base/options.h"

#include <atomic>
#include <charconv>
#include <cstdio>
#include <cstdlib>
#include <deque>
#include <mutex>
#include <optional>

namespace kernel_pytorch {
namespace {

constexpr std::string_view kCacheDirectory = "KERNEL_PYTORCH_CACHE_DIR";
constexpr std::string_view kLog = "KERNEL_PYTORCH_LOG";
constexpr std::string_view kCpuIsa = "KERNEL_PYTORCH_CPU_ISA";
constexpr std::string_view kNvrtc = "KERNEL_PYTORCH_NVRTC";
constexpr std::string_view kHiprtc = "KERNEL_PYTORCH_HIPRTC";
constexpr std::string_view kBundle = "KERNEL_PYTORCH_BUNDLE";
constexpr std::string_view kCubinMegabytes = "KERNEL_PYTORCH_CUBIN_CACHE_MB";
constexpr std::string_view kThreads = "KERNEL_PYTORCH_THREADS";
constexpr std::string_view kAutotune = "KERNEL_PYTORCH_AUTOTUNE";
constexpr std::string_view kDisableCuda = "KERNEL_PYTORCH_DISABLE_CUDA";
constexpr std::string_view kAmd = "KERNEL_PYTORCH_AMD";
constexpr std::string_view kCheck = "KERNEL_PYTORCH_CHECK";
constexpr std::string_view kPython = "KERNEL_PYTORCH_PYTHON";
constexpr std::string_view kNoColor = "NO_COLOR";

std::optional<std::string> read(std::string_view variable) {
  const char* value = std::getenv(std::string(variable).c_str());
  if (value == nullptr || *value == '\0') return std::nullopt;
  return value;
}

// The log is built on the options, so what is wrong with them goes straight to stderr.
void report_ignored(std::string_view variable, std::string_view value, std::string_view wanted) {
  std::fprintf(stderr, "kernel_pytorch: ignoring %.*s=%.*s: it must be %.*s\n", static_cast<int>(variable.size()),
               variable.data(), static_cast<int>(value.size()), value.data(), static_cast<int>(wanted.size()),
               wanted.data());
}

int64_t read_number(std::string_view variable, int64_t fallback, int64_t limit) {
  const auto text = read(variable);
  if (!text) return fallback;
  int64_t number = -1;
  const auto [end, error] = std::from_chars(text->data(), text->data() + text->size(), number);
  if (error != std::errc() || end != text->data() + text->size() || number < 0 || number > limit) {
    report_ignored(variable, *text, "a number from 0 to " + std::to_string(limit));
    return fallback;
  }
  return number;
}

bool read_switch(std::string_view variable) {
  const auto text = read(variable);
  if (!text || *text == "0" || *text == "false" || *text == "off") return false;
  if (*text == "1" || *text == "true" || *text == "on") return true;
  report_ignored(variable, *text, "0 or 1");
  return false;
}

std::string read_choice(std::string_view variable, std::string fallback,
                        std::initializer_list<std::string_view> choices) {
  const auto text = read(variable);
  if (!text) return fallback;
  std::string wanted = "one of";
  for (std::string_view choice : choices) {
    if (*text == choice) return *text;
    wanted.append(" ").append(choice);
  }
  report_ignored(variable, *text, wanted);
  return fallback;
}

std::string default_cache_directory() {
  if (const auto xdg = read("XDG_CACHE_HOME")) return *xdg + "/kernel_pytorch";
  if (const auto home = read("HOME")) return *home + "/.cache/kernel_pytorch";
  return "";  // nowhere to write: memory only
}

// Replaced options are kept alive for good: a caller may still hold a reference to them.
std::atomic<const Options*> current_options{nullptr};

}  // namespace

Options read_environment() {
  return Options{
      .cache_directory = read(kCacheDirectory).value_or(default_cache_directory()),
      .log_level = read_choice(kLog, "warning", {"error", "warning", "info", "debug"}),
      .cpu_isa =
          read_choice(kCpuIsa, "", {"v2", "v3", "v4", "v4bf16", "v4amx", "neon", "neondot", "neonbf16", "sve256"}),
      .nvrtc_library = read(kNvrtc).value_or(""),
      .hiprtc_library = read(kHiprtc).value_or(""),
      .bundle_directory = read(kBundle).value_or(""),
      .cubin_cache_megabytes = read_number(kCubinMegabytes, 1024, 1 << 20),
      .threads = static_cast<int>(read_number(kThreads, 0, 4096)),
      .autotune = read_switch(kAutotune),
      .disable_cuda = read_switch(kDisableCuda),
      .amd = read_switch(kAmd),
      .check_values = read_switch(kCheck),
      .no_color = read(kNoColor).has_value(),
  };
}

const Options& options() {
  if (const Options* known = current_options.load(std::memory_order_acquire)) return *known;
  static const Options* first = new Options(read_environment());
  const Options* expected = nullptr;
  current_options.compare_exchange_strong(expected, first);
  return *current_options.load(std::memory_order_acquire);
}

void set_options_for_process(const Options& replacement) {
  static std::mutex mutex;
  static auto* kept = new std::deque<Options>;
  const std::lock_guard lock(mutex);
  current_options.store(&kept->emplace_back(replacement), std::memory_order_release);
}

std::string environment(std::string_view variable) {
  return read(variable).value_or("");
}

std::vector<OptionDescription> describe_options() {
  const Options& now = options();
  const auto row = [](std::string_view variable, std::string value, std::string_view meaning) {
    return OptionDescription{variable, std::move(value), read(variable).has_value(), meaning};
  };
  return {
      row(kCacheDirectory, now.cache_directory, "where tuning results and compiled kernels are kept"),
      row(kLog, now.log_level, "error, warning, info or debug"),
      row(kCpuIsa, now.cpu_isa,
          "highest CPU instruction level used: v2, v3, v4, v4bf16, v4amx; neon, neondot, neonbf16, sve256"),
      row(kThreads, std::to_string(now.threads),
          "threads of the library's own pool; 0: one per physical core, within the quota"),
      row(kAutotune, now.autotune ? "1" : "0", "1: measure every new problem at its first call"),
      row(kDisableCuda, now.disable_cuda ? "1" : "0", "1: behave as on a machine without a GPU"),
      row(kAmd, now.amd ? "1" : "0",
          "1: run kernels on AMD GPUs, by libamdhip64; compiled and emulated, never run on hardware"),
      row(kCheck, now.check_values ? "1" : "0",
          "1: check offsets of packed sequences on a GPU too, which waits for it"),
      row(kNvrtc, now.nvrtc_library, "path of the libnvrtc to use; empty: search"),
      row(kHiprtc, now.hiprtc_library, "path of the libhiprtc to use; empty: the system's"),
      row(kBundle, now.bundle_directory, "folder of kernels compiled ahead by `kpt compile`"),
      row(kCubinMegabytes, std::to_string(now.cubin_cache_megabytes),
          "size limit of the compiled-kernel cache; 0: off"),
      row(kPython, read(kPython).value_or(""), "the Python that `kpt optimize` runs; empty: the one beside it"),
      row(kNoColor, now.no_color ? "1" : "0", "set: no colour in the terminal"),
  };
}

}  // namespace kernel_pytorch
