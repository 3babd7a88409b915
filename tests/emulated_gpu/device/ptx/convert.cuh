// Conversions, emulated: round to nearest even by integers; FP8 saturates; NaN becomes the type's one NaN.
#pragma once

#include "kernel_pytorch/base/fixed_width.h"

namespace kernel_pytorch::ptx {

inline uint32_t emulated_bf16_bits(float value) {
  const uint32_t bits = __float_as_uint(value);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return 0x7fffu;
  return (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16;
}
inline uint32_t emulated_f16_bits(float value) {
  if (value != value) return 0x7fffu;
  return __builtin_bit_cast(uint16_t, static_cast<_Float16>(value));
}
// Small floats whose largest finite magnitude is `kLargest`, its bits `kTop`.
template <int kMantissa, int kBias, uint32_t kTop>
inline uint32_t emulated_f8_bits(float value, float largest) {
  const uint32_t bits = __float_as_uint(value), sign = bits >> 24 & 0x80u;
  if (value != value) return sign | 0x7fu;
  const float magnitude = fabsf(value);
  if (magnitude >= largest) return sign | kTop;
  const float smallest_normal = __uint_as_float(static_cast<uint32_t>(128 - kBias) << 23);
  if (magnitude < smallest_normal) {
    // Units of the smallest subnormal number, rounded to even; the next binade follows by itself.
    const float unit = __uint_as_float(static_cast<uint32_t>(128 - kBias - kMantissa) << 23);
    return sign | static_cast<uint32_t>(rintf(magnitude / unit));
  }
  constexpr int kShift = 23 - kMantissa;
  const uint32_t word = bits & 0x7fffffffu;
  const uint32_t rounded = word + ((1u << (kShift - 1)) - 1) + (word >> kShift & 1u);
  const uint32_t result = (rounded >> kShift) - (static_cast<uint32_t>(127 - kBias) << kMantissa);
  return sign | (result > kTop ? kTop : result);
}
inline uint32_t emulated_e4m3_bits(float value) {
  return emulated_f8_bits<3, 7, 0x7eu>(value, 448.0f);
}
inline uint32_t emulated_e5m2_bits(float value) {
  return emulated_f8_bits<2, 15, 0x7bu>(value, 57344.0f);
}

inline uint32_t cvt_rn_bf16x2_f32(float high, float low) {
  return emulated_bf16_bits(high) << 16 | emulated_bf16_bits(low);
}
inline uint32_t cvt_rn_f16x2_f32(float high, float low) {
  return emulated_f16_bits(high) << 16 | emulated_f16_bits(low);
}
inline float cvt_f32_f16(uint16_t bits) {
  return static_cast<float>(__builtin_bit_cast(_Float16, bits));
}
inline uint16_t cvt_rn_satfinite_e4m3x2_f32(float high, float low) {
  return static_cast<uint16_t>(emulated_e4m3_bits(high) << 8 | emulated_e4m3_bits(low));
}
inline uint16_t cvt_rn_satfinite_e5m2x2_f32(float high, float low) {
  return static_cast<uint16_t>(emulated_e5m2_bits(high) << 8 | emulated_e5m2_bits(low));
}
inline uint32_t emulated_f16_of_e4m3(uint32_t byte) {
  const uint32_t sign = (byte & 0x80u) << 8, magnitude = byte & 0x7fu;
  if (magnitude == 0x7fu) return 0x7fffu;
  if (magnitude >= 8) return sign | (magnitude + (8u << 3)) << 7;
  const float value = static_cast<float>(magnitude) * 0x1p-9f;
  return sign | emulated_f16_bits(value);
}
inline uint32_t emulated_f16_of_e5m2(uint32_t byte) {
  return (byte & 0x7fu) > 0x7cu ? 0x7fffu : byte << 8;
}
inline uint32_t cvt_rn_f16x2_e4m3x2(uint16_t pair) {
  return emulated_f16_of_e4m3(pair >> 8) << 16 | emulated_f16_of_e4m3(pair & 0xffu);
}
inline uint32_t cvt_rn_f16x2_e5m2x2(uint16_t pair) {
  return emulated_f16_of_e5m2(pair >> 8) << 16 | emulated_f16_of_e5m2(pair & 0xffu);
}

}  // namespace kernel_pytorch::ptx
