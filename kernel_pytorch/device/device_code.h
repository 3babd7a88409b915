// A kernel of device code that can be compiled: which embedded source, and which function in it. The registry lists
// these for ahead-of-time compilation; jit turns one into a function of a loaded module.
#pragma once

#include <cstdint>
#include <limits>
#include <string>

namespace kernel_pytorch {

struct DeviceCode {
  std::string source;           // path of the embedded source: "kernel_pytorch/ops/row_norm/row_norm_cuda.cuh"
  std::string entry;            // name expression: "kernel_pytorch::row_norm::forward<float, RowConfig{256, 4}>"
  int minimum_capability = 80;  // 90 for sm_90 words; architecture-specific code (sm_90a) sets the flag below
  bool architecture_specific = false;
  // Shared memory that a block may have on the GPUs which take this code: where there is less, or more, they take
  // another (a smaller tile, a larger one). Asked when kernels are compiled ahead of time.
  int least_shared_kib = 0, most_shared_kib = std::numeric_limits<int>::max();
  std::string generated{};  // text written for this call, which the source includes as "kernel_pytorch/generated.cuh"
  friend bool operator==(const DeviceCode&, const DeviceCode&) = default;
};

}  // namespace kernel_pytorch
