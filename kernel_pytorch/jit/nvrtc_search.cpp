// The order: what the user names, what the process has loaded already, Python's hint, wheels next to torch, next to
// this library and in the virtual environment, then the system. It starts no Python: the folders follow from known
// paths.
#include "kernel_pytorch/jit/nvrtc_search.h"

#include <link.h>

#include <algorithm>
#include <charconv>
#include <filesystem>
#include <functional>
#include <mutex>
#include <optional>
#include <string_view>

#include "kernel_pytorch/base/options.h"
#include "kernel_pytorch/jit/jit.h"

namespace kernel_pytorch::jit {
namespace {

namespace fs = std::filesystem;

constexpr std::string_view kLibraryPrefix = "libnvrtc.so.";
constexpr std::string_view kBuiltinsPrefix = "libnvrtc-builtins.so.";

std::mutex search_path_mutex;
std::string* search_path = new std::string;

// "13.0.88" -> {13, 0, 88}; empty for anything that is not numbers and dots ("alt.so.13").
std::vector<int> parse_version(std::string_view text) {
  std::vector<int> numbers;
  while (!text.empty()) {
    int number = 0;
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
    if (error != std::errc()) return {};
    numbers.push_back(number);
    text.remove_prefix(end - text.data());
    if (text.empty()) break;
    if (text.front() != '.') return {};
    text.remove_prefix(1);
  }
  return numbers;
}

std::vector<std::string> split_paths(std::string_view text) {
  std::vector<std::string> parts;
  while (!text.empty()) {
    const size_t colon = std::min(text.find(':'), text.size());
    if (colon > 0) parts.emplace_back(text.substr(0, colon));
    text.remove_prefix(std::min(colon + 1, text.size()));
  }
  return parts;
}

std::vector<std::string> names_in(const fs::path& directory) {
  std::vector<std::string> names;
  std::error_code error;
  for (fs::directory_iterator item(directory, error), end; !error && item != end; item.increment(error)) {
    names.push_back(item->path().filename());
  }
  std::sort(names.begin(), names.end(), std::greater<>());  // newer versions first
  return names;
}

// Completes a candidate from the file names: libnvrtc.so.13 itself, its target, or the builtins in its folder.
NvrtcCandidate describe(const fs::path& library, std::string how) {
  NvrtcCandidate candidate{.path = library, .builtins = "", .how = std::move(how)};
  std::error_code error;
  const fs::path target = fs::canonical(library, error);
  int minor = -1;
  for (const fs::path& file : {library, error ? library : target}) {
    const std::string name = file.filename();
    if (!name.starts_with(kLibraryPrefix)) continue;
    const std::vector<int> version = parse_version(std::string_view(name).substr(kLibraryPrefix.size()));
    if (version.size() >= 1) candidate.major = version[0];
    if (version.size() >= 2) minor = version[1];
  }
  for (const std::string& name : names_in(library.parent_path())) {
    if (!name.starts_with(kBuiltinsPrefix)) continue;
    const std::vector<int> version = parse_version(std::string_view(name).substr(kBuiltinsPrefix.size()));
    if (version.size() != 2 || (candidate.major != 0 && version[0] != candidate.major)) continue;
    if (minor >= 0 && version[1] != minor) continue;
    candidate.builtins = library.parent_path() / name;
    candidate.major = version[0];
    minor = version[1];
    break;
  }
  if (minor >= 0) {
    candidate.minor = minor;
  } else {
    candidate.major = 0;
  }
  return candidate;
}

void add_directory(std::vector<NvrtcCandidate>& candidates, const fs::path& directory, const std::string& how) {
  std::vector<std::string> names = names_in(directory);
  for (const std::string& name : names) {
    if (!name.starts_with(kLibraryPrefix)) continue;
    // The plain "libnvrtc.so.13" is the name others load it by; the longer names are its targets.
    if (parse_version(std::string_view(name).substr(kLibraryPrefix.size())).size() != 1) continue;
    candidates.push_back(describe(directory / name, how));
  }
}

void add_site_packages(std::vector<NvrtcCandidate>& candidates, const fs::path& root, const std::string& how) {
  for (const std::string& name : names_in(root / "nvidia")) {
    if (name.starts_with("cu")) add_directory(candidates, root / "nvidia" / name / "lib", how);
  }
  add_directory(candidates, root / "torch" / "lib", how);
}

std::vector<std::string> loaded_libraries() {
  std::vector<std::string> paths;
  dl_iterate_phdr(
      [](dl_phdr_info* info, size_t, void* state) {
        if (info->dlpi_name != nullptr && *info->dlpi_name != '\0') {
          static_cast<std::vector<std::string>*>(state)->emplace_back(info->dlpi_name);
        }
        return 0;
      },
      &paths);
  return paths;
}

// ".../site-packages" of a loaded library that lives in one.
std::optional<std::string> site_packages_of(const std::string& library) {
  for (std::string_view folder : {"/site-packages/", "/dist-packages/"}) {
    const size_t at = library.find(folder);
    if (at != std::string::npos) return library.substr(0, at + folder.size() - 1);
  }
  return std::nullopt;
}

void add_wheels(std::vector<NvrtcCandidate>& candidates, const std::vector<std::string>& loaded) {
  std::vector<std::string> roots;
  const auto add_root = [&](const std::string& root, const char* how) {
    if (std::find(roots.begin(), roots.end(), root) != roots.end()) return;
    roots.push_back(root);
    add_site_packages(candidates, root, how);
  };
  for (const std::string& library : loaded) {
    const auto root = site_packages_of(library);
    if (root && library.find("/libtorch") != std::string::npos) add_root(*root, "torch's");
  }
  for (const std::string& library : loaded) {
    if (const auto root = site_packages_of(library)) add_root(*root, "PyPI's nvidia-cuda-nvrtc");
  }
  std::error_code error;
  const fs::path above_program = fs::read_symlink("/proc/self/exe", error).parent_path().parent_path();
  // `kpt` of a wheel sits in its environment's bin; that of a checkout in build/, next to .venv.
  for (const fs::path& environment_root : {above_program, above_program / ".venv", fs::path(environment("VIRTUAL_ENV")),
                                           fs::path(environment("CONDA_PREFIX"))}) {
    if (environment_root.empty()) continue;
    for (const std::string& name : names_in(environment_root / "lib")) {
      if (name.starts_with("python3")) {
        add_root(environment_root / "lib" / name / "site-packages", "PyPI's nvidia-cuda-nvrtc");
      }
    }
  }
}

void add_system(std::vector<NvrtcCandidate>& candidates) {
  std::vector<fs::path> directories;
  for (const std::string& directory : split_paths(environment("LD_LIBRARY_PATH"))) directories.emplace_back(directory);
  for (const char* variable : {"CUDA_HOME", "CUDA_PATH"}) {
    if (const std::string root = environment(variable); !root.empty()) directories.push_back(fs::path(root) / "lib64");
  }
  directories.emplace_back("/usr/local/cuda/lib64");
  for (const std::string& name : names_in("/usr/local")) {
    if (name.starts_with("cuda-")) directories.push_back(fs::path("/usr/local") / name / "lib64");
  }
  for (const char* directory : {"/usr/lib/x86_64-linux-gnu", "/usr/lib/aarch64-linux-gnu", "/usr/lib64", "/usr/lib"}) {
    directories.emplace_back(directory);
  }
  for (const fs::path& directory : directories) add_directory(candidates, directory, "system");
  for (const char* name : {"libnvrtc.so.13", "libnvrtc.so.12"}) {
    candidates.push_back({.path = name, .builtins = "", .how = "system"});
  }
}

}  // namespace

void set_nvrtc_search_path(const std::string& colon_separated_directories) {
  const std::lock_guard lock(search_path_mutex);
  *search_path = colon_separated_directories;
}

std::string nvrtc_search_path() {
  const std::lock_guard lock(search_path_mutex);
  return *search_path;
}

std::vector<NvrtcCandidate> nvrtc_candidates() {
  std::vector<NvrtcCandidate> candidates;
  if (const std::string& named = options().nvrtc_library; !named.empty()) {
    candidates.push_back(describe(named, "KERNEL_PYTORCH_NVRTC"));
    return candidates;
  }
  const std::vector<std::string> loaded = loaded_libraries();
  for (const std::string& library : loaded) {
    if (fs::path(library).filename().string().starts_with(kLibraryPrefix)) {
      candidates.push_back(describe(library, "already loaded"));
    }
  }
  for (const std::string& directory : split_paths(nvrtc_search_path())) {
    add_directory(candidates, directory, "set_nvrtc_search_path");
  }
  add_wheels(candidates, loaded);
  add_system(candidates);
  return candidates;
}

}  // namespace kernel_pytorch::jit
