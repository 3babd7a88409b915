// The formats of few bits: matrices whose rows are cut into groups of columns, with one scale for each group.
//
//   format  code           scale of a group                     group           value
//   nvfp4   E2M1, 4 bits   E4M3                                 16              tensor_scale * scale * code
//   mxfp4   E2M1, 4 bits   E8M0: a power of two, 0xff is NaN    32              scale * code
//   mxfp8   E4M3, 8 bits   E8M0                                 32              scale * code
//   int4    0 to 15        bf16, fp16 or fp32                   32, 64 or 128   scale * (code - zero)
//   int8    0 to 255       bf16, fp16 or fp32                   32, 64 or 128   scale * (code - zero)
//   int2, int3, int5, int6: as int4, with codes of so many bits
//
// The zero of an integer format is one byte for each group; where there are none it is half of the number of codes.
// The codes of a row lie bit by bit behind each other, the lowest bits of a byte first, and a row begins with a byte:
// 4-bit codes lie two in a byte, the one of the even column in the low half (the order of compressed-tensors' and
// gpt-oss's checkpoints), 3-bit codes eight in three bytes (GPTQ's order along its words).
//
// Rounding is written once, for CPU lanes and GPU threads; references round in their own words. Every product below is
// compared and never added to, so that no compiler makes an FMA of it.
#pragma once

#include "kernel_pytorch/base/fixed_width.h"

#ifdef __CUDACC_RTC__
#define KP_FORMAT_CODE __device__ __forceinline__
#else
#define KP_FORMAT_CODE [[gnu::always_inline, maybe_unused]] static inline
#endif

namespace kernel_pytorch::group_format {

enum class Format : uint8_t { kNvfp4, kMxfp4, kMxfp8, kInt4, kInt8, kInt2, kInt3, kInt5, kInt6 };
inline constexpr int kFormats = 9;
enum class ScaleType : uint8_t { kE4M3, kE8M0, kFloat32, kBFloat16, kFloat16 };

KP_SHARED_CODE constexpr bool is_integer(Format format) {
  return format != Format::kNvfp4 && format != Format::kMxfp4 && format != Format::kMxfp8;
}
KP_SHARED_CODE constexpr int code_bits(Format format) {
  return format == Format::kMxfp8 || format == Format::kInt8 ? 8
         : format == Format::kInt2                           ? 2
         : format == Format::kInt3                           ? 3
         : format == Format::kInt5                           ? 5
         : format == Format::kInt6                           ? 6
                                                             : 4;
}
KP_SHARED_CODE constexpr bool has_4_bits(Format format) {
  return code_bits(format) == 4;
}
// Neither 4 nor 8 bits: a code may lie in two bytes; eight of them are as many bytes as a code has bits.
KP_SHARED_CODE constexpr bool is_bit_stream(Format format) {
  return code_bits(format) != 4 && code_bits(format) != 8;
}
// Bytes of so many codes from the beginning of a row on.
KP_SHARED_CODE constexpr int64_t code_bytes(Format format, int64_t columns) {
  return (columns * code_bits(format) + 7) / 8;
}
KP_SHARED_CODE constexpr bool is_e2m1(Format format) {
  return format == Format::kNvfp4 || format == Format::kMxfp4;
}
KP_SHARED_CODE constexpr bool has_power_scale(Format format) {
  return format == Format::kMxfp4 || format == Format::kMxfp8;
}
KP_SHARED_CODE constexpr int codes_in_byte(Format format) {  // of formats of 4 and 8 bits
  return has_4_bits(format) ? 2 : 1;
}
KP_SHARED_CODE constexpr int last_code(Format format) {
  return (1 << code_bits(format)) - 1;
}
// Where a format has no zeros of its own.
KP_SHARED_CODE constexpr int middle_code(Format format) {
  return 1 << (code_bits(format) - 1);
}
// A legal size of a group; the first is the usual one of integers.
KP_SHARED_CODE constexpr bool is_legal_group(Format format, int64_t group) {
  if (is_integer(format)) return group == 32 || group == 64 || group == 128;
  return group == (format == Format::kNvfp4 ? 16 : 32);
}

KP_FORMAT_CODE uint32_t bits_of(float value) {
  return __builtin_bit_cast(uint32_t, value);
}
KP_FORMAT_CODE float from_bits(uint32_t bits) {
  return __builtin_bit_cast(float, bits);
}
inline constexpr uint32_t kInfinityBits = 0x7f800000, kNaNBits = 0x7fc00000;

#ifdef __CUDACC_RTC__
KP_FORMAT_CODE float fma_once(float a, float b, float c) {
  return __fmaf_rn(a, b, c);
}
KP_FORMAT_CODE float nearest_integer(float value) {
  return rintf(value);
}
KP_FORMAT_CODE float floor_of(float value) {
  return floorf(value);
}
#else
KP_FORMAT_CODE float fma_once(float a, float b, float c) {
  return __builtin_fmaf(a, b, c);
}
KP_FORMAT_CODE float nearest_integer(float value) {
  return __builtin_rintf(value);
}
KP_FORMAT_CODE float floor_of(float value) {
  return __builtin_floorf(value);
}
#endif

// ---- values ----

// The values of the eight codes without a sign, 0 0.5 1 1.5 2 3 4 6, are those of floats with two bits of exponent and
// one of mantissa. No subnormal float stands between: XLA's threads flush them to 0.
KP_FORMAT_CODE float e2m1_value(uint32_t code) {
  const uint32_t magnitude = code & 7;
  const float value = magnitude < 2 ? static_cast<float>(static_cast<int32_t>(magnitude)) * 0.5f
                                    : from_bits((magnitude << 22) + (126u << 23));
  return from_bits(bits_of(value) | (code & 8) << 28);
}
KP_FORMAT_CODE float e4m3_value(uint32_t code) {
  const uint32_t magnitude = code & 0x7f;
  const float normal = magnitude == 0x7f ? from_bits(kNaNBits) : from_bits((magnitude << 20) + (120u << 23));
  const float value = magnitude < 8 ? static_cast<float>(static_cast<int32_t>(magnitude)) * 0x1p-9f : normal;
  return from_bits(bits_of(value) | (code & 0x80) << 24);
}
KP_FORMAT_CODE float e8m0_value(uint32_t code) {
  return code == 0xff ? from_bits(kNaNBits) : from_bits(code == 0 ? 0x00400000u : code << 23);
}
template <Format kFormat>
KP_FORMAT_CODE float code_value(uint32_t code, int32_t zero) {
  if constexpr (is_integer(kFormat)) {
    return static_cast<float>(static_cast<int32_t>(code) - zero);
  } else if constexpr (is_e2m1(kFormat)) {
    return e2m1_value(code);
  } else {
    return e4m3_value(code);
  }
}

// ---- scales ----

// A float from 0 on, to nearest even with so many bits of mantissa, and the exponent of the least normal number.
KP_FORMAT_CODE float round_positive(float value, int mantissa_bits, int least_exponent) {
  const uint32_t bits = bits_of(value);
  const int dropped = 23 - mantissa_bits;
  const uint32_t half = (1u << (dropped - 1)) - 1 + (bits >> dropped & 1);
  const float normal = from_bits((bits + half) >> dropped << dropped);
  // Below, the grid is even: it is that of floats of this size.
  const float even = from_bits(static_cast<uint32_t>(least_exponent + dropped + 127) << 23);
  return value < from_bits(static_cast<uint32_t>(least_exponent + 127) << 23) ? (value + even) - even : normal;
}
KP_FORMAT_CODE float round_e4m3(float value) {
  const float rounded = round_positive(value, 3, -6);
  return rounded > 448.0f ? 448.0f : rounded;
}
// The code of a value that is one of E4M3's, from 0 on.
KP_FORMAT_CODE uint32_t e4m3_code(float value) {
  const uint32_t normal = (bits_of(value) >> 20) - (120u << 3);
  return value < 0x1p-6f ? static_cast<uint32_t>(static_cast<int32_t>(value * 0x1p9f)) : normal;
}

struct Range {
  uint32_t amax;    // bits of the largest magnitude
  float low, high;  // at most 0, at least 0; of integers with zeros
};
struct GroupScale {
  float stored;   // as it is kept: rounded to its type
  float value;    // what codes are multiplied by, tensor_scale included; 0: all codes are those of 0
  float inverse;  // about 1 / value
  int32_t zero;
};

// Integer scales below this are 0, and so are the values of their groups: the products of rounding stay normal numbers.
inline constexpr float kLeastIntegerScale = 0x1p-100f;

KP_FORMAT_CODE float nearest_quotient(float value, float scale, float inverse);

// The scale of a group. One with a NaN or an infinity gets NaN, which is then the value of all its elements.
template <Format kFormat>
KP_FORMAT_CODE GroupScale scale_of(const Range& range, bool has_zeros, ScaleType type, float tensor_scale) {
  const bool is_finite = range.amax < kInfinityBits;
  const float amax = from_bits(range.amax);
  float stored = 0.0f;
  if constexpr (kFormat == Format::kNvfp4) {
    stored = round_e4m3(amax / (6.0f * tensor_scale));
  } else if constexpr (has_power_scale(kFormat)) {
    // OCP: the exponent of the largest element less that of the format's largest number (6, 448).
    const int32_t exponent = static_cast<int32_t>(range.amax >> 23) - (kFormat == Format::kMxfp4 ? 2 : 8);
    stored = e8m0_value(static_cast<uint32_t>(exponent < 0 ? 0 : exponent));
  } else {
    const float steps = static_cast<float>(has_zeros ? last_code(kFormat) : middle_code(kFormat) - 1);
    const float exact = has_zeros ? range.high / steps - range.low / steps : amax / steps;
    const float rounded = type == ScaleType::kFloat16    ? round_positive(exact, 10, -14)
                          : type == ScaleType::kBFloat16 ? round_positive(exact, 7, -126)
                                                         : exact;
    stored = exact < kLeastIntegerScale ? 0.0f : rounded;
  }
  if (!is_finite) stored = from_bits(kNaNBits);
  GroupScale scale{stored, kFormat == Format::kNvfp4 ? stored * tensor_scale : stored, 0.0f, middle_code(kFormat)};
  scale.inverse = scale.value > 0.0f ? 1.0f / scale.value : 0.0f;
  if constexpr (is_integer(kFormat)) {
    if (has_zeros) {
      const float zero = scale.value > 0.0f ? nearest_quotient(-range.low, scale.value, scale.inverse) : 0.0f;
      scale.zero = zero > static_cast<float>(last_code(kFormat)) ? last_code(kFormat) : static_cast<int32_t>(zero);
    }
  }
  return scale;
}
// The byte of a scale of the formats that have such scales.
template <Format kFormat>
KP_FORMAT_CODE uint32_t scale_byte(float stored) {
  const bool is_nan = !(stored >= 0.0f);
  if constexpr (kFormat == Format::kNvfp4) return is_nan ? 0x7fu : e4m3_code(stored);
  return is_nan ? 0xffu : bits_of(stored) >> 23;
}

// ---- codes ----

// value / scale to the nearest integer, ties to even: exact, since signs of fused sums are. Scales are normal numbers.
KP_FORMAT_CODE float nearest_quotient(float value, float scale, float inverse) {
  const float guess = nearest_integer(value * inverse);  // off by one at most
  const float above = fma_once(-(guess + 0.5f), scale, value), below = fma_once(-(guess - 0.5f), scale, value);
  const bool is_odd = (static_cast<int32_t>(guess) & 1) != 0;
  const float up = above > 0.0f || (above == 0.0f && is_odd) ? 1.0f : 0.0f;
  const float down = below < 0.0f || (below == 0.0f && is_odd) ? 1.0f : 0.0f;
  return guess + up - down;
}
KP_FORMAT_CODE float stochastic_quotient(float value, float scale, float inverse, uint32_t random) {
  const float guess = floor_of(value * inverse);  // off by one at most
  const float rest = fma_once(-guess, scale, value);
  const float low = rest < 0.0f ? guess - 1.0f : rest >= scale ? guess + 1.0f : guess;
  const float share = fma_once(-low, scale, value);
  return share > static_cast<float>(random) * 0x1p-16f * scale ? low + 1.0f : low;
}

// How many boundaries a magnitude is above; ties go to the even code.
KP_FORMAT_CODE uint32_t nearest_e2m1(float magnitude, float scale) {
  return static_cast<uint32_t>((magnitude > 0.25f * scale) + (magnitude >= 0.75f * scale) +
                               (magnitude > 1.25f * scale) + (magnitude >= 1.75f * scale) + (magnitude > 2.5f * scale) +
                               (magnitude >= 3.5f * scale) + (magnitude > 5.0f * scale));
}
KP_FORMAT_CODE uint32_t stochastic_e2m1(float magnitude, float scale, uint32_t random) {
  const uint32_t low =
      static_cast<uint32_t>((magnitude >= 0.5f * scale) + (magnitude >= 1.0f * scale) + (magnitude >= 1.5f * scale) +
                            (magnitude >= 2.0f * scale) + (magnitude >= 3.0f * scale) + (magnitude >= 4.0f * scale) +
                            (magnitude >= 6.0f * scale));
  const float step = low < 4 ? 0.5f : low < 6 ? 1.0f : 2.0f;
  const float share = fma_once(-e2m1_value(low), scale, magnitude);
  return low < 7 && share > static_cast<float>(random) * 0x1p-16f * (step * scale) ? low + 1 : low;
}
KP_FORMAT_CODE uint32_t stochastic_e4m3(float magnitude, uint32_t random) {
  const float least = 0x1p-6f;
  const float base = magnitude < least ? least : from_bits(bits_of(magnitude) & kInfinityBits);
  const float step = base * 0.125f;
  const float low = floor_of(magnitude / step) * step;  // exact: a power of two
  const float value = magnitude - low > static_cast<float>(random) * 0x1p-16f * step ? low + step : low;
  return e4m3_code(value > 448.0f ? 448.0f : value);
}

// The code of one element. kStochastic: `random` are its 16 bits.
template <Format kFormat, bool kStochastic>
KP_FORMAT_CODE uint32_t code_of(float value, const GroupScale& scale, uint32_t random) {
  const float magnitude = from_bits(bits_of(value) & 0x7fffffff);
  const uint32_t sign = bits_of(value) >> 31;
  if constexpr (is_integer(kFormat)) {
    const float quotient = kStochastic ? stochastic_quotient(value, scale.value, scale.inverse, random)
                                       : nearest_quotient(value, scale.value, scale.inverse);
    const int32_t code = scale.value > 0.0f ? static_cast<int32_t>(quotient) + scale.zero : scale.zero;
    return static_cast<uint32_t>(code < 0 ? 0 : code > last_code(kFormat) ? last_code(kFormat) : code);
  } else if constexpr (is_e2m1(kFormat)) {
    const uint32_t code =
        kStochastic ? stochastic_e2m1(magnitude, scale.value, random) : nearest_e2m1(magnitude, scale.value);
    return sign << 3 | (scale.value > 0.0f ? code : 0u);
  } else {
    // By a power of two: nothing is rounded here.
    const float quotient = scale.value > 0.0f ? magnitude / scale.value : 0.0f;
    return sign << 7 | (kStochastic ? stochastic_e4m3(quotient, random) : e4m3_code(round_e4m3(quotient)));
  }
}

}  // namespace kernel_pytorch::group_format
