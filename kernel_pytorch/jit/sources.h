// The device sources inside the library, and what each of them includes. embedded_sources() is written by
// cmake/embed_sources.cmake at build time; an #include "..." of a device source can only name one of them.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "kernel_pytorch/device/device_code.h"

namespace kernel_pytorch::jit {

struct EmbeddedSource {
  std::string_view path;  // "kernel_pytorch/cuda/tile/reduce.cuh": what an #include says
  std::string_view text;
};

std::span<const EmbeddedSource> embedded_sources();

// The one file that is not embedded: DeviceCode::generated stands behind this name.
inline constexpr std::string_view kGeneratedPath = "kernel_pytorch/generated.cuh";

// A source and everything it reaches by #include "...", itself first, the rest by path. Throws kInternal for a path
// that is not embedded; a quoted include that is not embedded is left out (it sits in a host-only branch, or NVRTC
// will name it).
struct SourceClosure {
  std::vector<EmbeddedSource> files;
  std::string hash;     // of every path and text, 32 hex digits
  uint64_t short_hash;  // the same in 64 bits
};
// The reference stays valid for good.
const SourceClosure& closure_of(const std::string& path);
// The same for AMD GPUs: the files of hip/ptx and hip/tile stand under the names of their counterparts in cuda, and
// hip/words.cuh is among the files. `missing`: an instruction's file that has no counterpart, so that the source cannot
// be compiled.
inline constexpr std::string_view kAmdWords = "kernel_pytorch/hip/words.cuh";
struct HipClosure {
  SourceClosure closure;
  std::string missing;
};
HipClosure hip_closure_of(const DeviceCode& code);
// With the generated text, of which it holds a view: valid as long as `code`.
SourceClosure closure_of(const DeviceCode& code);

}  // namespace kernel_pytorch::jit
