// Philox (base/philox.h) with a block in every lane: the same bits as philox() one block at a time, many times faster.
#pragma once

#include <cstdint>

#include "kernel_pytorch/base/philox.h"
#include "kernel_pytorch/cpu/vec.h"

namespace kernel_pytorch::cpu {
inline namespace KP_ISA_NAMESPACE {

struct WideProduct {
  VecU low;
  VecU high;
};

// The 64-bit products of the lanes with a factor, in halves. The instructions multiply the even lanes; the odd ones are
// moved there first, and the halves of their products back among the even ones'.
KP_PRIMITIVE WideProduct multiply_wide(VecU v, uint32_t factor) {
#if defined(__AVX512F__)
  constexpr __mmask8 kAll = 0xff;
  constexpr auto kOddToEven = static_cast<_MM_PERM_ENUM>(0xf5), kEvenToOdd = static_cast<_MM_PERM_ENUM>(0xa0);
  const __m512i lanes = reinterpret_cast<__m512i>(v), by = _mm512_set1_epi64(factor);
  const __m512i even = _mm512_maskz_mul_epu32(kAll, lanes, by);
  const __m512i odd = _mm512_maskz_mul_epu32(kAll, _mm512_maskz_srli_epi64(kAll, lanes, 32), by);
  return {reinterpret_cast<VecU>(_mm512_mask_shuffle_epi32(even, 0xaaaa, odd, kEvenToOdd)),
          reinterpret_cast<VecU>(_mm512_mask_shuffle_epi32(odd, 0x5555, even, kOddToEven))};
#elif defined(__AVX2__)
  const __m256i lanes = reinterpret_cast<__m256i>(v), by = _mm256_set1_epi64x(factor);
  const __m256i even = _mm256_mul_epu32(lanes, by), odd = _mm256_mul_epu32(_mm256_srli_epi64(lanes, 32), by);
  return {reinterpret_cast<VecU>(_mm256_blend_epi32(even, _mm256_shuffle_epi32(odd, 0xa0), 0xaa)),
          reinterpret_cast<VecU>(_mm256_blend_epi32(odd, _mm256_shuffle_epi32(even, 0xf5), 0x55))};
#elif defined(__SSE4_1__)
  const __m128i lanes = reinterpret_cast<__m128i>(v), by = _mm_set1_epi64x(factor);
  const __m128i even = _mm_mul_epu32(lanes, by), odd = _mm_mul_epu32(_mm_srli_epi64(lanes, 32), by);
  return {reinterpret_cast<VecU>(_mm_blend_epi16(even, _mm_shuffle_epi32(odd, 0xa0), 0xcc)),
          reinterpret_cast<VecU>(_mm_blend_epi16(odd, _mm_shuffle_epi32(even, 0xf5), 0x33))};
#elif defined(__ARM_FEATURE_SVE)
  const SveWords high = svmulh_n_u32_x(svptrue_b32(), SveWords(v), factor);
  return {v * factor, VecU(high)};
#elif defined(__aarch64__)
  const uint32x4_t even = vreinterpretq_u32_u64(vmull_n_u32(vget_low_u32(v), factor));
  const uint32x4_t odd = vreinterpretq_u32_u64(vmull_high_n_u32(v, factor));
  return {vuzp1q_u32(even, odd), vuzp2q_u32(even, odd)};
#endif
}

// Writes the lanes of four vectors in turn: a[0] b[0] c[0] d[0] a[1] ...
KP_PRIMITIVE void store_interleaved(uint32_t* to, VecU a, VecU b, VecU c, VecU d) {
#if defined(__x86_64__)
#if defined(__AVX512F__)
#define KP_UNPACK(half, bits, x, y) \
  _mm512_maskz_unpack##half##_epi##bits((bits == 32 ? 0xffff : 0xff), (__m512i)(x), (__m512i)(y))
#elif defined(__AVX2__)
#define KP_UNPACK(half, bits, x, y) _mm256_unpack##half##_epi##bits((__m256i)(x), (__m256i)(y))
#else
#define KP_UNPACK(half, bits, x, y) _mm_unpack##half##_epi##bits((__m128i)(x), (__m128i)(y))
#endif
  const auto ab_low = KP_UNPACK(lo, 32, a, b), ab_high = KP_UNPACK(hi, 32, a, b);
  const auto cd_low = KP_UNPACK(lo, 32, c, d), cd_high = KP_UNPACK(hi, 32, c, d);
  // Sixteen bytes of each hold a block; a vector holds every fourth.
  const VecU rows[4] = {(VecU)KP_UNPACK(lo, 64, ab_low, cd_low), (VecU)KP_UNPACK(hi, 64, ab_low, cd_low),
                        (VecU)KP_UNPACK(lo, 64, ab_high, cd_high), (VecU)KP_UNPACK(hi, 64, ab_high, cd_high)};
#undef KP_UNPACK
  for (int part = 0; part < kLanes / 4; ++part) {
    for (int row = 0; row < 4; ++row) {
      __builtin_memcpy(to + 16 * part + 4 * row, reinterpret_cast<const char*>(&rows[row]) + 16 * part, 16);
    }
  }
#elif defined(__ARM_FEATURE_SVE)
  svst4_u32(svptrue_b32(), to, svcreate4_u32(SveWords(a), SveWords(b), SveWords(c), SveWords(d)));
#elif defined(__aarch64__)
  vst4q_u32(to, uint32x4x4_t{a, b, c, d});
#endif
}

// Words of kLanes consecutive blocks, in their order: 8 * kLanes elements of 16 bits.
KP_PRIMITIVE void philox_blocks(uint64_t seed, uint64_t offset, uint64_t first_block, uint32_t* to) {
  VecU lane;
  for (int i = 0; i < kLanes; ++i) lane[i] = static_cast<uint32_t>(i);
  VecU x0 = lane + static_cast<uint32_t>(first_block);
  VecU x1 = broadcast(static_cast<uint32_t>(first_block >> 32)) - reinterpret_cast<VecU>(x0 < lane);  // the carry
  VecU x2 = broadcast(static_cast<uint32_t>(offset)), x3 = broadcast(static_cast<uint32_t>(offset >> 32));
  uint32_t key0 = static_cast<uint32_t>(seed), key1 = static_cast<uint32_t>(seed >> 32);
  for (int round = 0; round < kPhiloxRounds; ++round) {
    const WideProduct product0 = multiply_wide(x0, 0xd2511f53u), product1 = multiply_wide(x2, 0xcd9e8d57u);
    x0 = product1.high ^ x1 ^ key0;
    x1 = product1.low;
    x2 = product0.high ^ x3 ^ key1;
    x3 = product0.low;
    key0 += 0x9e3779b9;
    key1 += 0xbb67ae85;
  }
  store_interleaved(to, x0, x1, x2, x3);
}

}  // namespace KP_ISA_NAMESPACE
}  // namespace kernel_pytorch::cpu
