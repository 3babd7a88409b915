// What cuTensorMapEncodeTiled stores in its 128 bytes here.
#pragma once

#include <cstdint>

namespace emulated {

inline constexpr uint32_t kTensorMapMark = 0x7e25014d;

struct TensorMap {
  uint32_t mark;
  uint32_t rank;
  uint64_t address;
  uint64_t sizes[5];
  uint64_t strides[4];  // bytes, of dimensions 1 to rank - 1
  uint16_t box[5];
  uint16_t element_bytes;
  uint16_t swizzle_bytes;
};
static_assert(sizeof(TensorMap) <= 128);

}  // namespace emulated
