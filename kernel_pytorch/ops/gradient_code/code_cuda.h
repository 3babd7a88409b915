// The codes of gradients, for host and device: sizes, and the arithmetic of one number, each operation rounded once.
#pragma once

#include "kernel_pytorch/base/fixed_width.h"

namespace kernel_pytorch::gradient_code {

enum class Code : uint8_t { kInt8, kInt4, kOneBit };
inline constexpr int kCodes = 3;

inline constexpr int kTile = 256;  // elements that a kernel takes at once: a multiple of every block
KP_SHARED_CODE constexpr int block_elements(Code code) {
  return code == Code::kInt4 ? 64 : 256;
}
KP_SHARED_CODE constexpr int bits_of(Code code) {
  return code == Code::kInt8 ? 8 : code == Code::kInt4 ? 4 : 1;
}
// The largest integer, by which a block's largest magnitude is divided.
KP_SHARED_CODE constexpr float largest_step(Code code) {
  return code == Code::kInt8 ? 127.0f : 7.0f;
}

// The sum of a small number and this has the nearest integer in its lowest bits, and is it but for this.
inline constexpr float kRounder = 0x1.8p23f;
inline constexpr float kLeastScale = 0x1p-126f;

}  // namespace kernel_pytorch::gradient_code
