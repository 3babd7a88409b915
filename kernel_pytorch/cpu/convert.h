// Lanes of stored elements (bf16, fp16, FP8 as bits) to float lanes and back: round to nearest even, FP8 saturating,
// bit for bit what base/float_types.h gives, NaN included. No step reads or makes a denormal float, so flush-to-zero
// modes (torch.set_flush_denormal) and their slow path change nothing.
#pragma once

#include "kernel_pytorch/base/float_types.h"
#include "kernel_pytorch/cpu/vec.h"

namespace kernel_pytorch::cpu {
inline namespace KP_ISA_NAMESPACE {

template <class T>
struct StorageOfElement;
template <>
struct StorageOfElement<float> {
  using Type = Vec;
};
template <>
struct StorageOfElement<double> {
  using Type = VecD;
};
template <>
struct StorageOfElement<BFloat16> {
  using Type = VecU16;
};
template <>
struct StorageOfElement<Float16> {
  using Type = VecU16;
};
template <>
struct StorageOfElement<Float8E4M3> {
  using Type = VecU8;
};
template <>
struct StorageOfElement<Float8E5M2> {
  using Type = VecU8;
};
template <class T>
using StorageOf = typename StorageOfElement<T>::Type;

#if defined(__AVX512F__)
// The forms with a mask fold to the plain instructions; g++ 12 warns of the plain intrinsics' undefined operand.
constexpr __mmask16 kAllLanes = 0xffff;
#endif

KP_PRIMITIVE VecU widen_bits(VecU16 v) {
#if defined(__AVX512F__)
  return reinterpret_cast<VecU>(_mm512_maskz_cvtepu16_epi32(kAllLanes, reinterpret_cast<__m256i>(v)));
#elif defined(__AVX2__)
  return reinterpret_cast<VecU>(_mm256_cvtepu16_epi32(reinterpret_cast<__m128i>(v)));
#elif defined(__ARM_FEATURE_SVE)
  VecU whole;  // a NEON register is the lower half of SVE's; g++ 12 would go through memory
  asm("" : "=w"(whole) : "0"(v));
  const SveWords wide = svunpklo_u32(svreinterpret_u16_u32(SveWords(whole)));
  return VecU(wide);
#else
  return __builtin_convertvector(v, VecU);
#endif
}
KP_PRIMITIVE VecU widen_bits(VecU8 v) {
#if defined(__AVX512F__)
  return reinterpret_cast<VecU>(_mm512_maskz_cvtepu8_epi32(kAllLanes, reinterpret_cast<__m128i>(v)));
#elif defined(__AVX2__)
  return reinterpret_cast<VecU>(_mm256_cvtepu8_epi32(_mm_cvtsi64_si128(reinterpret_cast<long long>(v))));
#elif defined(__aarch64__) && KP_LANES == 8
  return widen_bits(vmovl_u8(v));
#elif defined(__aarch64__)
  return vmovl_u16(vget_low_u16(vmovl_u8(vreinterpret_u8_u32(vdup_n_u32(reinterpret_cast<uint32_t>(v))))));
#else
  return __builtin_convertvector(v, VecU);
#endif
}
// Every lane must already fit.
KP_PRIMITIVE VecU16 narrow_to_16(VecU v) {
#if defined(__AVX512F__)
  return reinterpret_cast<VecU16>(_mm512_maskz_cvtepi32_epi16(kAllLanes, reinterpret_cast<__m512i>(v)));
#elif defined(__AVX2__)
  const __m256i by_128_bits = _mm256_packus_epi32(reinterpret_cast<__m256i>(v), reinterpret_cast<__m256i>(v));
  return reinterpret_cast<VecU16>(_mm256_castsi256_si128(_mm256_permute4x64_epi64(by_128_bits, 0x08)));
#else
  return __builtin_convertvector(v, VecU16);
#endif
}
KP_PRIMITIVE VecU8 narrow_to_8(VecU v) {
#if defined(__AVX512F__)
  return reinterpret_cast<VecU8>(_mm512_maskz_cvtepi32_epi8(kAllLanes, reinterpret_cast<__m512i>(v)));
#elif defined(__AVX2__)
  const __m128i words = reinterpret_cast<__m128i>(narrow_to_16(v));
  return reinterpret_cast<VecU8>(_mm_cvtsi128_si64(_mm_packus_epi16(words, words)));
#elif defined(__aarch64__) && KP_LANES == 8
  return vmovn_u16(narrow_to_16(v));
#elif defined(__aarch64__)
  const uint16x4_t words = narrow_to_16(v);
  return reinterpret_cast<VecU8>(vget_lane_u32(vreinterpret_u32_u8(vmovn_u16(vcombine_u16(words, words))), 0));
#else
  return __builtin_convertvector(v, VecU8);
#endif
}

KP_PRIMITIVE Vec bfloat16_to_float(VecU16 v) {
  return from_bits(widen_bits(v) << 16);
}

// The rounded bfloat16 in the upper half of each lane; the lower half is left over.
// kOfBfloat16: of values computed from bf16 alone, whose NaNs have no bits below bf16's that rounding could carry into
// the exponent.
template <bool kOfBfloat16 = false>
KP_PRIMITIVE VecU round_to_bfloat16(Vec value) {
  const VecU bits = bits_of(value);
#if defined(__AVX512F__)
  // Five instructions where compare, blend, shift and two adds are seven: rows of bf16 are bound by them, not by
  // memory.
  const __m512i from = reinterpret_cast<__m512i>(bits);
  const __mmask16 odd = _mm512_test_epi32_mask(from, _mm512_set1_epi32(0x10000));
  if constexpr (kOfBfloat16) {
    const __m512i nearly = _mm512_add_epi32(from, _mm512_set1_epi32(0x7fff));
    return reinterpret_cast<VecU>(_mm512_mask_add_epi32(nearly, odd, nearly, _mm512_set1_epi32(1)));
  }
  const __mmask16 nan =
      _mm512_cmp_ps_mask(reinterpret_cast<__m512>(value), reinterpret_cast<__m512>(value), _CMP_UNORD_Q);
  __m512i rounded = _mm512_add_epi32(from, _mm512_set1_epi32(0x7fff));
  rounded = _mm512_mask_add_epi32(rounded, odd, rounded, _mm512_set1_epi32(1));
  return reinterpret_cast<VecU>(_mm512_mask_or_epi32(rounded, nan, from, _mm512_set1_epi32(0x400000)));
#else
  return select(is_nan(value), bits | 0x400000u, bits + 0x7fffu + ((bits >> 16) & 1u));
#endif
}
KP_PRIMITIVE VecU16 float_to_bfloat16(Vec value) {
  return narrow_to_16(round_to_bfloat16(value) >> 16);
}

// A format with fewer bits, the sign taken off and given back by the caller.
template <int kExponentBits, int kMantissaBits>
KP_PRIMITIVE Vec small_magnitude_to_float(VecU magnitude) {
  constexpr uint32_t kBias = (1u << (kExponentBits - 1)) - 1;
  const VecU moved = magnitude << (23 - kMantissaBits);
  const Vec normal = from_bits(moved + ((127 - kBias) << 23));
  // A subnormal is its mantissa put behind a leading one, with that one taken off again: exact, and never denormal.
  const VecU leading_one = broadcast((128 - kBias) << 23);
  const Vec subnormal = from_bits(moved | leading_one) - from_bits(leading_one);
  return select(magnitude < (1u << kMantissaBits), subnormal, normal);
}

template <int kExponentBits, int kMantissaBits>
KP_PRIMITIVE VecU float_magnitude_to_small(VecU magnitude, uint32_t largest) {
  constexpr uint32_t kBias = (1u << (kExponentBits - 1)) - 1;
  constexpr int kShift = 23 - kMantissaBits;
  const VecU odd = (magnitude >> kShift) & 1u;
  const VecU normal = ((magnitude + ((1u << (kShift - 1)) - 1) + odd) >> kShift) - ((127 - kBias) << kMantissaBits);
  // Adding a power of two whose last place is the format's least value lets the adder round.
  const VecU power = broadcast((128 - kBias + kShift) << 23);
  const VecU subnormal = bits_of(from_bits(magnitude) + from_bits(power)) - power;
  return min(select(magnitude < ((128 - kBias) << 23), subnormal, normal), broadcast(largest));
}

KP_PRIMITIVE Vec float16_bits_to_float(VecU bits) {
  const VecU magnitude = bits & 0x7fffu;
  const VecU special = (magnitude << 13) | 0x7f800000u;
  const VecU quiet = select(magnitude > 0x7c00u, broadcast(0x400000u), VecU{});
  const VecU finite = bits_of(small_magnitude_to_float<5, 10>(magnitude));
  return from_bits(select(magnitude >= 0x7c00u, special | quiet, finite) | ((bits & 0x8000u) << 16));
}

KP_PRIMITIVE Vec float16_to_float(VecU16 v) {
#if defined(__AVX512F__)
  return reinterpret_cast<Vec>(_mm512_maskz_cvtph_ps(kAllLanes, reinterpret_cast<__m256i>(v)));
#elif defined(__F16C__)
  return reinterpret_cast<Vec>(_mm256_cvtph_ps(reinterpret_cast<__m128i>(v)));
#elif defined(__aarch64__) && KP_LANES == 8
  const VecU halves = widen_bits(v);
  const SveFloat wide = svcvt_f32_f16_x(svptrue_b32(), svreinterpret_f16_u32(SveWords(halves)));
  return Vec(wide);
#elif defined(__aarch64__)
  return vcvt_f32_f16(reinterpret_cast<float16x4_t>(v));
#else
  return float16_bits_to_float(widen_bits(v));
#endif
}

KP_PRIMITIVE VecU16 float_to_float16(Vec value) {
#if defined(__AVX512F__)
  return reinterpret_cast<VecU16>(
      _mm512_maskz_cvtps_ph(kAllLanes, reinterpret_cast<__m512>(value), _MM_FROUND_TO_NEAREST_INT));
#elif defined(__F16C__)
  return reinterpret_cast<VecU16>(_mm256_cvtps_ph(reinterpret_cast<__m256>(value), _MM_FROUND_TO_NEAREST_INT));
#elif defined(__aarch64__) && KP_LANES == 8
  const SveWords halves = svreinterpret_u32_f16(svcvt_f16_f32_x(svptrue_b32(), SveFloat(value)));
  return narrow_to_16(VecU(halves) & 0xffffu);
#elif defined(__aarch64__)
  return reinterpret_cast<VecU16>(vcvt_f16_f32(value));
#else
  const VecU bits = bits_of(value);
  const VecU sign = (bits >> 16) & 0x8000u;
  const VecU nan = 0x7e00u | ((bits >> 13) & 0x3ffu);
  const VecU finite = float_magnitude_to_small<5, 10>(bits & 0x7fffffffu, 0x7c00);
  return narrow_to_16(sign | select(is_nan(value), nan, finite));
#endif
}

KP_PRIMITIVE Vec float8_e4m3_to_float(VecU8 v) {
  const VecU bits = widen_bits(v);
  const VecU magnitude = bits & 0x7fu;
  const VecU finite = bits_of(small_magnitude_to_float<4, 3>(magnitude));
  return from_bits(select(magnitude == 0x7fu, broadcast(0x7fc00000u), finite) | ((bits & 0x80u) << 24));
}
KP_PRIMITIVE Vec float8_e5m2_to_float(VecU8 v) {
#if defined(__F16C__) || defined(__aarch64__)
  return float16_to_float(__builtin_convertvector(v, VecU16) << 8);
#else
  return float16_bits_to_float(widen_bits(v) << 8);
#endif
}

template <int kExponentBits, int kMantissaBits>
KP_PRIMITIVE VecU8 float_to_float8(Vec value, uint32_t largest) {
  const VecU bits = bits_of(value);
  const VecU finite = float_magnitude_to_small<kExponentBits, kMantissaBits>(bits & 0x7fffffffu, largest);
  return narrow_to_8(((bits >> 24) & 0x80u) | select(is_nan(value), broadcast(0x7fu), finite));
}

template <class T>
KP_PRIMITIVE VecOf<T> decode(StorageOf<T> stored) {
  if constexpr (__is_same(T, BFloat16)) {
    return bfloat16_to_float(stored);
  } else if constexpr (__is_same(T, Float16)) {
    return float16_to_float(stored);
  } else if constexpr (__is_same(T, Float8E4M3)) {
    return float8_e4m3_to_float(stored);
  } else if constexpr (__is_same(T, Float8E5M2)) {
    return float8_e5m2_to_float(stored);
  } else {
    return stored;
  }
}

template <class T>
KP_PRIMITIVE StorageOf<T> encode(VecOf<T> value) {
  if constexpr (__is_same(T, BFloat16)) {
    return float_to_bfloat16(value);
  } else if constexpr (__is_same(T, Float16)) {
    return float_to_float16(value);
  } else if constexpr (__is_same(T, Float8E4M3)) {
    return float_to_float8<4, 3>(value, 0x7e);
  } else if constexpr (__is_same(T, Float8E5M2)) {
    return float_to_float8<5, 2>(value, 0x7b);
  } else {
    return value;
  }
}

}  // namespace KP_ISA_NAMESPACE
}  // namespace kernel_pytorch::cpu
