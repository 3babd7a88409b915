// FP8 by integers, for GPUs without its instructions or with other formats under its name (gfx90a; gfx942's
// instructions are for the formats without infinity and negative zero). Host and device: a test compares every value.
#pragma once

#include "kernel_pytorch/base/fixed_width.h"

namespace kernel_pytorch::hip {

// A float's bits to those of a small float whose largest finite magnitude is `kTop`: to nearest even, saturating.
template <int kMantissa, int kBias, uint32_t kTop>
KP_SHARED_CODE constexpr uint32_t to_float8(uint32_t bits) {
  constexpr int kShift = 23 - kMantissa;
  constexpr uint32_t kSmallestNormal = static_cast<uint32_t>(128 - kBias) << 23;
  const uint32_t sign = bits >> 24 & 0x80u, magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return 0x7fu;
  if (magnitude >= kSmallestNormal) {
    const uint32_t rounded = magnitude + ((1u << (kShift - 1)) - 1) + (magnitude >> kShift & 1u);
    const uint32_t result = (rounded >> kShift) - (static_cast<uint32_t>(127 - kBias) << kMantissa);
    return sign | (result > kTop ? kTop : result);
  }
  // Units of the smallest subnormal number; the next binade follows by itself.
  const int distance = kShift + (128 - kBias) - static_cast<int>(magnitude >> 23);
  if (distance > 24) return sign;
  const uint32_t significand = (magnitude & 0x7fffffu) | 0x800000u, half = 1u << (distance - 1);
  const uint32_t whole = significand >> distance, rest = significand & (2 * half - 1);
  return sign | (whole + (rest > half || (rest == half && (whole & 1u) != 0)));
}
KP_SHARED_CODE constexpr uint32_t to_e4m3(uint32_t bits) {
  return to_float8<3, 7, 0x7eu>(bits);
}
KP_SHARED_CODE constexpr uint32_t to_e5m2(uint32_t bits) {
  return to_float8<2, 15, 0x7bu>(bits);
}

// Exact: every FP8 value is an fp16 value.
KP_SHARED_CODE constexpr uint32_t e4m3_to_f16(uint32_t byte) {
  const uint32_t sign = (byte & 0x80u) << 8, magnitude = byte & 0x7fu;
  if (magnitude == 0x7fu) return 0x7fffu;
  if (magnitude >= 8) return sign | (magnitude + (8u << 3)) << 7;
  const uint32_t top = magnitude >= 4 ? 2 : magnitude >= 2 ? 1 : 0;
  return magnitude == 0 ? sign : sign | (top + 6) << 10 | (magnitude << (10 - top) & 0x3ffu);
}
KP_SHARED_CODE constexpr uint32_t e5m2_to_f16(uint32_t byte) {
  return (byte & 0x7fu) > 0x7cu ? 0x7fffu : byte << 8;
}

}  // namespace kernel_pytorch::hip
