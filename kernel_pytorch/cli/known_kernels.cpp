#include "kernel_pytorch/cli/known_kernels.h"

#include <charconv>
#include <filesystem>
#include <sstream>

#include "kernel_pytorch/base/error.h"
#include "kernel_pytorch/cli/command.h"
#include "kernel_pytorch/cli/files.h"

namespace kernel_pytorch::cli {
namespace {

constexpr int64_t kLimitBytes = 1 << 22;

std::string first_line(const std::string& architecture) {
  if (jit::is_amd(architecture)) {
    return concat("kernels that HIPRTC ", jit::hiprtc_info().version, " compiles without spills and warnings");
  }
  const jit::NvrtcInfo& nvrtc = jit::nvrtc_info();
  return concat("kernels that NVRTC ", nvrtc.major, ".", nvrtc.minor, " compiles without spills and warnings");
}

size_t number_in(std::string_view text, const std::string& again) {
  size_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size()) {
    throw UsageError(concat("compile: --again \"", again, "\" is no part; write it like 3/16"));
  }
  return value;
}

}  // namespace

KnownKernels::KnownKernels(std::string path, const std::string& again, std::string architecture)
    : path_(std::move(path)), architecture_(std::move(architecture)) {
  if (!again.empty()) {
    const size_t slash = std::min(again.find('/'), again.size() - 1);
    part_ = number_in(std::string_view(again).substr(0, slash), again);
    parts_ = number_in(std::string_view(again).substr(slash + 1), again);
    if (part_ >= parts_) throw UsageError(concat("compile: --again ", again, ": parts are counted from 0"));
  }
  if (path_.empty() || !std::filesystem::exists(path_)) return;
  std::istringstream lines(read_file(path_, kLimitBytes));
  std::string line;
  std::getline(lines, line);
  if (line != first_line(architecture_)) return;
  while (std::getline(lines, line)) known_.insert(line);
}

std::vector<DeviceCode> KnownKernels::left_of(const std::vector<DeviceCode>& codes) {
  std::vector<DeviceCode> left;
  for (const DeviceCode& code : codes) {
    const std::string key = jit::bundle_key(code, architecture_);
    const bool is_due = parts_ != 0 && std::stoull(key.substr(0, 8), nullptr, 16) % parts_ == part_;
    if (known_.contains(key) && !is_due) {
      kept_.insert(key);
    } else {
      left.push_back(code);
    }
  }
  return left;
}

void KnownKernels::record(const std::vector<jit::CompiledKernel>& compiled, bool of_all) const {
  std::set<std::string> keys = of_all ? kept_ : known_;
  for (const jit::CompiledKernel& kernel : compiled) keys.insert(kernel.key);
  std::string text = first_line(architecture_) + "\n";
  for (const std::string& key : keys) text += key + "\n";
  write_file(path_, text);
}

}  // namespace kernel_pytorch::cli
