#include "kernel_pytorch/jit/hiprtc_library.h"

#include <dlfcn.h>

#include <filesystem>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "kernel_pytorch/base/options.h"

namespace kernel_pytorch::jit {
namespace {

// ROCm 5.2 (Debian 12) has HIPRTC inside libamdhip64; later ones in a library of its own.
constexpr std::string_view kHiprtcNames[] = {"libhiprtc.so.7", "libhiprtc.so.6", "libhiprtc.so.5", "libamdhip64.so.5"};
constexpr std::string_view kNoHiprtc =
    "no HIPRTC to compile kernels for AMD GPUs with; install ROCm's, or on Debian "
    "`apt-get install libamdhip64-5 libhiprtc-builtins5`, or name a libhiprtc in KERNEL_PYTORCH_HIPRTC";

// "5.2.21153" for libamdhip64.so.5.2.21153, whose hiprtcVersion answers 9.0 whatever the release; a library without a
// number in its name is asked.
std::string version_of(const HiprtcLibrary& library) {
  std::error_code error;
  const std::string name = std::filesystem::canonical(library.info.path, error).filename().string();
  if (const size_t at = name.find(".so."); at != std::string::npos) return name.substr(at + 4);
  int major = 0, minor = 0;
  library.version(&major, &minor);
  return concat(major, ".", minor);
}

// The code object manager below HIPRTC tells: HIPRTC 5.2 ends the process where it is asked for an architecture that it
// does not know.
std::vector<std::string> known_architectures() {
  std::vector<std::string> known;
  void* handle = dlopen("libamd_comgr.so.2", RTLD_NOW | RTLD_LOCAL);  // which HIPRTC itself loads, up to ROCm 6
  if (handle == nullptr) return known;
  const auto count_of = reinterpret_cast<int (*)(size_t*)>(dlsym(handle, "amd_comgr_get_isa_count"));
  const auto name_of = reinterpret_cast<int (*)(size_t, const char**)>(dlsym(handle, "amd_comgr_get_isa_name"));
  size_t count = 0;
  if (count_of == nullptr || name_of == nullptr || count_of(&count) != 0) return known;
  for (size_t i = 0; i < count; ++i) {
    const char* name = nullptr;  // "amdgcn-amd-amdhsa--gfx90a"
    if (name_of(i, &name) != 0 || name == nullptr) continue;
    const std::string_view isa = name;
    known.emplace_back(isa.substr(isa.rfind('-') + 1));
  }
  return known;
}

// Fills `library`; returns what went wrong.
std::string load_hiprtc(const std::string& name, HiprtcLibrary& library) {
  void* handle = dlopen(name.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (handle == nullptr) return dlerror();
#define KP_HIPRTC_RESOLVE(member, symbol, parameters)                                 \
  library.member = reinterpret_cast<decltype(library.member)>(dlsym(handle, symbol)); \
  if (library.member == nullptr) return concat(name, " has no ", symbol);
  KP_HIPRTC_FUNCTIONS(KP_HIPRTC_RESOLVE)
#undef KP_HIPRTC_RESOLVE
  library.error_string = reinterpret_cast<decltype(library.error_string)>(dlsym(handle, "hiprtcGetErrorString"));
  if (library.error_string == nullptr) return concat(name, " has no hiprtcGetErrorString");
  library.architectures = known_architectures();
  Dl_info where{};
  const bool known = dladdr(reinterpret_cast<void*>(library.compile), &where) != 0 && where.dli_fname != nullptr;
  library.info.path = known ? where.dli_fname : name;
  library.info.version = version_of(library);
  library.info.found = true;
  return "";
}

std::unique_ptr<const HiprtcLibrary> choose_hiprtc(const std::string& named) {
  std::vector<std::string> candidates;
  if (!named.empty()) {
    candidates.push_back(named);
  } else {
    // What the loader finds, then where ROCm says that it is.
    const std::string root = environment("ROCM_PATH");
    for (const std::string_view name : kHiprtcNames) {
      candidates.emplace_back(name);
      if (!root.empty()) candidates.push_back(concat(root, "/lib/", name));
    }
  }
  std::string problem;
  for (const std::string& candidate : candidates) {
    auto library = std::make_unique<HiprtcLibrary>();
    problem = load_hiprtc(candidate, *library);
    if (problem.empty()) return library;
  }
  auto none = std::make_unique<HiprtcLibrary>();
  none->info.absence = concat(kNoHiprtc, named.empty() ? "" : concat(" (", problem, ")"));
  return none;
}

// A choice is kept for each value of the option; the libraries stay loaded for good.
const HiprtcLibrary& hiprtc_choice() {
  static std::mutex mutex;
  static auto* choices = new std::map<std::string, std::unique_ptr<const HiprtcLibrary>>;
  const std::lock_guard lock(mutex);
  const std::string& named = options().hiprtc_library;
  std::unique_ptr<const HiprtcLibrary>& chosen = (*choices)[named];
  if (chosen == nullptr) chosen = choose_hiprtc(named);
  return *chosen;
}

}  // namespace

const HiprtcInfo& hiprtc_info() {
  return hiprtc_choice().info;
}

const HiprtcLibrary& require_hiprtc() {
  const HiprtcLibrary& chosen = hiprtc_choice();
  if (!chosen.info.found) fail(ErrorCode::kDevice, "jit: ", chosen.info.absence);
  return chosen;
}

}  // namespace kernel_pytorch::jit
