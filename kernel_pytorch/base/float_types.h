// Storage types of the low precisions. Conversions round to nearest even; the FP8 formats saturate where torch gives
// NaN. NaN stays NaN, made quiet where a conversion changes the format's kind (fp16, FP8), as the hardware does. Scalar
// and constexpr: references, tests and tails use them; SIMD and CUDA have their own, tested bit for bit against these.
#pragma once

#include <bit>
#include <cstdint>

namespace kernel_pytorch {

struct BFloat16 {
  uint16_t bits = 0;
};
struct Float16 {
  uint16_t bits = 0;
};
struct Float8E4M3 {  // finite-only variant: no infinities, NaN is 0x7f / 0xff, largest 448
  uint8_t bits = 0;
};
struct Float8E5M2 {  // largest finite 57344
  uint8_t bits = 0;
};

namespace float_detail {

// Rounds a finite float to a small format with the given field widths, returning sign-less bits. Values past `largest`
// return `overflow`.
constexpr uint32_t round_to_small(float magnitude, int exponent_bits, int mantissa_bits, uint32_t largest,
                                  uint32_t overflow) {
  const uint32_t bits = std::bit_cast<uint32_t>(magnitude);
  const int bias = (1 << (exponent_bits - 1)) - 1;
  const int exponent = static_cast<int>(bits >> 23) - 127;
  uint32_t mantissa = (bits & 0x7fffff) | 0x800000;
  if ((bits >> 23) == 0) return 0;  // float denormals are far below every small format's least value
  const int least_exponent = 1 - bias;
  const int extra = exponent < least_exponent ? least_exponent - exponent : 0;
  const int shift = 23 - mantissa_bits + extra;
  if (shift > 24) return 0;
  const uint32_t kept = mantissa >> shift;
  const uint32_t rest = mantissa & ((1u << shift) - 1);
  const uint32_t half = 1u << (shift - 1);
  uint32_t rounded = kept + (rest > half || (rest == half && (kept & 1)) ? 1 : 0);
  // `kept` holds the hidden bit where the number is normal, so adding it to the exponent field carries by itself.
  const uint32_t result = extra > 0 ? rounded : rounded + (static_cast<uint32_t>(exponent + bias - 1) << mantissa_bits);
  return result > largest ? overflow : result;
}

constexpr float small_to_float(uint32_t bits, int exponent_bits, int mantissa_bits) {
  const int bias = (1 << (exponent_bits - 1)) - 1;
  const uint32_t exponent = bits >> mantissa_bits;
  const uint32_t mantissa = bits & ((1u << mantissa_bits) - 1);
  if (exponent == 0) {
    float unit = 1.0f;
    for (int i = 0; i < bias - 1 + mantissa_bits; ++i) unit *= 0.5f;
    return static_cast<float>(mantissa) * unit;
  }
  return std::bit_cast<float>(((exponent + 127 - bias) << 23) | (mantissa << (23 - mantissa_bits)));
}

constexpr bool is_nan(uint32_t float_bits) {
  return (float_bits & 0x7fffffff) > 0x7f800000;
}

}  // namespace float_detail

constexpr float to_float(float value) {
  return value;
}
constexpr double to_float(double value) {
  return value;
}
constexpr float to_float(BFloat16 value) {
  return std::bit_cast<float>(static_cast<uint32_t>(value.bits) << 16);
}
constexpr float to_float(Float16 value) {
  const uint32_t sign = (value.bits & 0x8000u) << 16;
  const uint32_t magnitude = value.bits & 0x7fffu;
  if (magnitude > 0x7c00) return std::bit_cast<float>(sign | 0x7fc00000u | ((magnitude & 0x3ff) << 13));
  if (magnitude == 0x7c00) return std::bit_cast<float>(sign | 0x7f800000u);
  return std::bit_cast<float>(sign | std::bit_cast<uint32_t>(float_detail::small_to_float(magnitude, 5, 10)));
}
constexpr float to_float(Float8E4M3 value) {
  const uint32_t sign = (value.bits & 0x80u) << 24;
  const uint32_t magnitude = value.bits & 0x7fu;
  if (magnitude == 0x7f) return std::bit_cast<float>(sign | 0x7fc00000u);
  return std::bit_cast<float>(sign | std::bit_cast<uint32_t>(float_detail::small_to_float(magnitude, 4, 3)));
}
constexpr float to_float(Float8E5M2 value) {
  const uint32_t sign = (value.bits & 0x80u) << 24;
  const uint32_t magnitude = value.bits & 0x7fu;
  if (magnitude > 0x7c) return std::bit_cast<float>(sign | 0x7fc00000u | ((magnitude & 3) << 21));
  if (magnitude == 0x7c) return std::bit_cast<float>(sign | 0x7f800000u);
  return std::bit_cast<float>(sign | std::bit_cast<uint32_t>(float_detail::small_to_float(magnitude, 5, 2)));
}

template <class T>
constexpr T from_float(float value);

template <>
constexpr float from_float<float>(float value) {
  return value;
}
template <>
constexpr double from_float<double>(float value) {
  return value;
}
template <>
constexpr BFloat16 from_float<BFloat16>(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  if (float_detail::is_nan(bits)) return {static_cast<uint16_t>((bits >> 16) | 0x40)};
  return {static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16)};
}
template <>
constexpr Float16 from_float<Float16>(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  const uint16_t sign = (bits >> 16) & 0x8000;
  if (float_detail::is_nan(bits)) return {static_cast<uint16_t>(sign | 0x7e00 | ((bits >> 13) & 0x3ff))};
  const uint32_t magnitude = bits & 0x7fffffff;
  if (magnitude == 0x7f800000) return {static_cast<uint16_t>(sign | 0x7c00)};
  const uint32_t rounded = float_detail::round_to_small(std::bit_cast<float>(magnitude), 5, 10, 0x7bff, 0x7c00);
  return {static_cast<uint16_t>(sign | rounded)};
}
template <>
constexpr Float8E4M3 from_float<Float8E4M3>(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  const uint8_t sign = (bits >> 24) & 0x80;
  if (float_detail::is_nan(bits)) return {static_cast<uint8_t>(sign | 0x7f)};
  const uint32_t magnitude = bits & 0x7fffffff;
  if (magnitude == 0x7f800000) return {static_cast<uint8_t>(sign | 0x7e)};
  return {static_cast<uint8_t>(sign | float_detail::round_to_small(std::bit_cast<float>(magnitude), 4, 3, 0x7e, 0x7e))};
}
template <>
constexpr Float8E5M2 from_float<Float8E5M2>(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  const uint8_t sign = (bits >> 24) & 0x80;
  if (float_detail::is_nan(bits)) return {static_cast<uint8_t>(sign | 0x7f)};
  const uint32_t magnitude = bits & 0x7fffffff;
  if (magnitude == 0x7f800000) return {static_cast<uint8_t>(sign | 0x7b)};
  return {static_cast<uint8_t>(sign | float_detail::round_to_small(std::bit_cast<float>(magnitude), 5, 2, 0x7b, 0x7b))};
}

}  // namespace kernel_pytorch
