// Floats of 16 and 8 bits as floats.
#pragma once

#include <cstdint>
#include <cstring>

#include "tests/emulated_gpu/device/interface.h"

namespace emulated {

inline float float_of_bits(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

// Tables of every fp16, e4m3 and e5m2 value.
const float* f16_values();
const float* e4m3_values();
const float* e5m2_values();

// `count` elements at consecutive addresses.
inline void widen(int type, const void* source, int count, float* values) {
  const auto* halves = static_cast<const uint16_t*>(source);
  const auto* bytes = static_cast<const uint8_t*>(source);
  switch (type) {
    case kEmulatedBf16:
      for (int i = 0; i < count; ++i) values[i] = float_of_bits(uint32_t{halves[i]} << 16);
      return;
    case kEmulatedF16:
      for (int i = 0; i < count; ++i) values[i] = f16_values()[halves[i]];
      return;
    case kEmulatedE4M3:
      for (int i = 0; i < count; ++i) values[i] = e4m3_values()[bytes[i]];
      return;
    case kEmulatedE5M2:
      for (int i = 0; i < count; ++i) values[i] = e5m2_values()[bytes[i]];
      return;
    default:  // tf32: the lower 13 bits are not read
      for (int i = 0; i < count; ++i) {
        uint32_t bits;
        std::memcpy(&bits, static_cast<const char*>(source) + 4 * i, 4);
        values[i] = float_of_bits(bits & 0xffffe000u);
      }
  }
}

}  // namespace emulated
