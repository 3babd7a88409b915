// Chooses among nvrtc_candidates(). A choice is kept for as long as the options that led to it stay the same; when
// nothing was found the search is made again, since a framework may have brought an NVRTC in the meantime.
#include "kernel_pytorch/jit/nvrtc_library.h"

#include <dlfcn.h>

#include <filesystem>
#include <map>
#include <memory>
#include <mutex>

#include "kernel_pytorch/base/error.h"
#include "kernel_pytorch/base/log.h"
#include "kernel_pytorch/base/options.h"
#include "kernel_pytorch/device/cuda/driver_table.h"
#include "kernel_pytorch/jit/nvrtc_search.h"

namespace kernel_pytorch::jit {
namespace {

constexpr int kOldestMajor = 12;  // C++20 and sm_90a
constexpr std::string_view kCure =
    "; install one with `pip install nvidia-cuda-nvrtc`, or name a libnvrtc in "
    "KERNEL_PYTORCH_NVRTC, or use kernels compiled ahead (`kpt compile`, "
    "KERNEL_PYTORCH_BUNDLE)";

// Cubins run on every driver of the same major version (CUDA's minor version compatibility), not on an older major.
std::string refusal(int major, int minor) {
  if (major < kOldestMajor) return concat("version ", major, ".", minor, " is older than ", kOldestMajor, ".0");
  const cuda_device::DriverTable* driver = options().disable_cuda || options().amd ? nullptr : cuda_device::driver();
  if (driver == nullptr || major <= driver->version / 1000) return "";
  return concat("version ", major, ".", minor, " is newer than the driver can run (CUDA ", driver->version / 1000, ".",
                driver->version % 1000 / 10, ")");
}

// Fills `library` from a candidate; returns what went wrong.
std::string load(const NvrtcCandidate& candidate, NvrtcLibrary& library) {
  // NVRTC looks for its builtins by name only, so those in its folder must be loaded first.
  if (!candidate.builtins.empty()) dlopen(candidate.builtins.c_str(), RTLD_NOW | RTLD_GLOBAL);
  void* handle = dlopen(candidate.path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (handle == nullptr) return dlerror();
#define KP_NVRTC_RESOLVE(member, symbol, parameters)                                  \
  library.member = reinterpret_cast<decltype(library.member)>(dlsym(handle, symbol)); \
  if (library.member == nullptr) return concat(candidate.path, " has no ", symbol);
  KP_NVRTC_FUNCTIONS(KP_NVRTC_RESOLVE)
#undef KP_NVRTC_RESOLVE
  library.error_string = reinterpret_cast<decltype(library.error_string)>(dlsym(handle, "nvrtcGetErrorString"));
  if (library.error_string == nullptr) return concat(candidate.path, " has no nvrtcGetErrorString");
  int count = 0;
  if (library.version(&library.info.major, &library.info.minor) != 0 || library.supported_count(&count) != 0) {
    return concat(candidate.path, " does not answer");
  }
  library.capabilities.resize(count);
  if (library.supported(library.capabilities.data()) != 0) return concat(candidate.path, " does not answer");
  Dl_info where{};
  const bool known = dladdr(reinterpret_cast<void*>(library.version), &where) != 0 && where.dli_fname != nullptr;
  library.info.path = known ? where.dli_fname : candidate.path;
  library.info.how = candidate.how;
  library.info.found = true;
  return refusal(library.info.major, library.info.minor);
}

struct Choice {
  std::unique_ptr<const NvrtcInfo> info;
  std::unique_ptr<const NvrtcLibrary> library;  // null until it had to be loaded
};

Choice choose(bool must_load) {
  std::string problems;
  const auto note = [&](const std::string& path, const std::string& problem) {
    if (problem.empty()) return;
    KP_LOG(kDebug, "jit: passing over ", path, ": ", problem);
    problems += concat(problems.empty() ? ": " : "; ", path, ": ", problem);
  };
  for (const NvrtcCandidate& candidate : nvrtc_candidates()) {
    const bool is_file = candidate.path.find('/') != std::string::npos;
    std::error_code error;
    if (is_file && !std::filesystem::exists(candidate.path, error)) {
      note(candidate.path, "no such file");
      continue;
    }
    if (candidate.major != 0) {
      if (const std::string reason = refusal(candidate.major, candidate.minor); !reason.empty()) {
        note(candidate.path, reason);
        continue;
      }
      if (!must_load) {
        return {std::make_unique<NvrtcInfo>(
                    NvrtcInfo{true, candidate.major, candidate.minor, candidate.path, candidate.how, ""}),
                nullptr};
      }
    }
    auto library = std::make_unique<NvrtcLibrary>();
    if (const std::string problem = load(candidate, *library); !problem.empty()) {
      if (is_file) note(candidate.path, problem);  // a bare name that the loader does not know is no news
      continue;
    }
    auto info = std::make_unique<NvrtcInfo>(library->info);
    return {std::move(info), std::move(library)};
  }
  NvrtcInfo none;
  none.absence = concat("no NVRTC to compile kernels with", problems, kCure);
  return {std::make_unique<NvrtcInfo>(none), nullptr};
}

// Every choice is kept, so that references given out stay valid.
struct Choices {
  std::mutex mutex;
  std::map<std::string, Choice> by_options;
  std::vector<Choice> replaced;
};

const Choice& choice(bool must_load) {
  static Choices* choices = new Choices;
  const std::string key = concat(options().nvrtc_library, "\n", nvrtc_search_path(), "\n", options().disable_cuda);
  const std::lock_guard lock(choices->mutex);
  Choice& current = choices->by_options[key];
  const bool is_final = current.info != nullptr && current.info->found && (!must_load || current.library != nullptr);
  if (is_final) return current;
  Choice next = choose(must_load);
  const bool same_absence = current.info != nullptr && !next.info->found && current.info->absence == next.info->absence;
  if (same_absence) return current;
  if (current.info != nullptr) choices->replaced.push_back(std::move(current));
  current = std::move(next);
  return current;
}

}  // namespace

const NvrtcInfo& nvrtc_info(bool load) {
  return *choice(load).info;
}

const NvrtcLibrary& require_nvrtc() {
  const Choice& chosen = choice(true);
  if (chosen.library == nullptr) fail(ErrorCode::kDevice, "jit: ", chosen.info->absence);
  return *chosen.library;
}

}  // namespace kernel_pytorch::jit
