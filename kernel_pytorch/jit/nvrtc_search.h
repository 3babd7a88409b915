// Where a libnvrtc may be, without loading one: dlopen of NVRTC costs up to 0.3 s, and a warm cubin cache needs only
// its version, which the file names next to it contain.
#pragma once

#include <string>
#include <vector>

namespace kernel_pytorch::jit {

struct NvrtcCandidate {
  std::string path;      // a file, or a bare name for the loader to resolve
  std::string builtins;  // libnvrtc-builtins in its folder, to be loaded first; empty if there is none
  std::string how;
  int major = 0;  // 0: unknown until loaded
  int minor = 0;
};

// In order of preference. With Options::nvrtc_library set, that one alone.
std::vector<NvrtcCandidate> nvrtc_candidates();

// The directories set by set_nvrtc_search_path.
std::string nvrtc_search_path();

}  // namespace kernel_pytorch::jit
