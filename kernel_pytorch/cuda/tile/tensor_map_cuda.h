// What the copy engine knows of a tensor, as a kernel parameter (const __grid_constant__ TensorMap): 128 opaque bytes
// that the host encodes (device/cuda/tensor_map.h). Host and device.
#pragma once

#include "kernel_pytorch/base/fixed_width.h"

namespace kernel_pytorch::tile {

struct alignas(64) TensorMap {
  uint64_t words[16];
};

}  // namespace kernel_pytorch::tile
