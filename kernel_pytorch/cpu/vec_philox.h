// Philox (base/philox.h) with a block in every lane: the same bits as philox() one block at a time, many times faster.
#pragma once

#include <cstdint>

#include "kernel_pytorch/base/philox.h"
#include "kernel_pytorch/cpu/load_store.h"

namespace kernel_pytorch::cpu {
inline namespace KP_ISA_NAMESPACE {

#if defined(__x86_64__)

// A 32-bit word of every second block, in the lower halves of 64-bit lanes: multiplications read those alone and leave
// both halves of the product, so nothing is moved between them but upper halves. What an upper half holds is never
// read.
#if defined(__AVX512F__)
KP_PRIMITIVE VecU64 multiply_lower(VecU64 v, uint32_t factor) {
  return reinterpret_cast<VecU64>(
      _mm512_maskz_mul_epu32(0xff, reinterpret_cast<__m512i>(v), _mm512_set1_epi64(factor)));
}
// The upper halves, by a shuffle: Zen 5 does four of these per cycle and two shifts.
KP_PRIMITIVE VecU64 upper_words(VecU64 v) {
  return reinterpret_cast<VecU64>(
      _mm512_maskz_shuffle_epi32(0xffff, reinterpret_cast<__m512i>(v), static_cast<_MM_PERM_ENUM>(0xf5)));
}
// The lower halves of both: first into the lower, second into the upper ones.
KP_PRIMITIVE VecU64 join_lower(VecU64 first, VecU64 second) {
  return reinterpret_cast<VecU64>(_mm512_mask_shuffle_epi32(
      reinterpret_cast<__m512i>(first), 0xaaaa, reinterpret_cast<__m512i>(second), static_cast<_MM_PERM_ENUM>(0xa0)));
}
#elif defined(__AVX2__)
KP_PRIMITIVE VecU64 multiply_lower(VecU64 v, uint32_t factor) {
  return reinterpret_cast<VecU64>(_mm256_mul_epu32(reinterpret_cast<__m256i>(v), _mm256_set1_epi64x(factor)));
}
KP_PRIMITIVE VecU64 upper_words(VecU64 v) {
  return reinterpret_cast<VecU64>(_mm256_shuffle_epi32(reinterpret_cast<__m256i>(v), 0xf5));
}
KP_PRIMITIVE VecU64 join_lower(VecU64 first, VecU64 second) {
  const __m256i raised = _mm256_shuffle_epi32(reinterpret_cast<__m256i>(second), 0xa0);
  return reinterpret_cast<VecU64>(_mm256_blend_epi32(reinterpret_cast<__m256i>(first), raised, 0xaa));
}
#else
KP_PRIMITIVE VecU64 multiply_lower(VecU64 v, uint32_t factor) {
  return reinterpret_cast<VecU64>(_mm_mul_epu32(reinterpret_cast<__m128i>(v), _mm_set1_epi64x(factor)));
}
KP_PRIMITIVE VecU64 upper_words(VecU64 v) {
  return reinterpret_cast<VecU64>(_mm_shuffle_epi32(reinterpret_cast<__m128i>(v), 0xf5));
}
KP_PRIMITIVE VecU64 join_lower(VecU64 first, VecU64 second) {
  const __m128i raised = _mm_shuffle_epi32(reinterpret_cast<__m128i>(second), 0xa0);
  return reinterpret_cast<VecU64>(_mm_blend_epi16(reinterpret_cast<__m128i>(first), raised, 0xcc));
}
#endif

// The first two words of the even blocks, their last two, and those of the odd ones, to where the blocks belong.
KP_PRIMITIVE void store_blocks(uint32_t* to, VecU64 even, VecU64 even_end, VecU64 odd, VecU64 odd_end) {
  // Sixteen bytes of each hold a block: 4 k, 4 k + 1, 4 k + 2 and 4 k + 3 in the k-th sixteen of the four.
#if defined(__AVX512F__)
#define KP_BITS(v) reinterpret_cast<__m512i>(v)
#define KP_PARTS(x, y, which) _mm512_maskz_shuffle_i64x2(0xff, x, y, which)
  const __m512i first = _mm512_maskz_unpacklo_epi64(0xff, KP_BITS(even), KP_BITS(even_end));
  const __m512i second = _mm512_maskz_unpacklo_epi64(0xff, KP_BITS(odd), KP_BITS(odd_end));
  const __m512i third = _mm512_maskz_unpackhi_epi64(0xff, KP_BITS(even), KP_BITS(even_end));
  const __m512i fourth = _mm512_maskz_unpackhi_epi64(0xff, KP_BITS(odd), KP_BITS(odd_end));
  const __m512i low01 = KP_PARTS(first, second, 0x44), high01 = KP_PARTS(first, second, 0xee);
  const __m512i low23 = KP_PARTS(third, fourth, 0x44), high23 = KP_PARTS(third, fourth, 0xee);
  store_storage(to, KP_PARTS(low01, low23, 0x88));
  store_storage(to + 16, KP_PARTS(low01, low23, 0xdd));
  store_storage(to + 32, KP_PARTS(high01, high23, 0x88));
  store_storage(to + 48, KP_PARTS(high01, high23, 0xdd));
#elif defined(__AVX2__)
#define KP_BITS(v) reinterpret_cast<__m256i>(v)
#define KP_PARTS(x, y, which) _mm256_permute2x128_si256(x, y, which)
  const __m256i first = _mm256_unpacklo_epi64(KP_BITS(even), KP_BITS(even_end));
  const __m256i second = _mm256_unpacklo_epi64(KP_BITS(odd), KP_BITS(odd_end));
  const __m256i third = _mm256_unpackhi_epi64(KP_BITS(even), KP_BITS(even_end));
  const __m256i fourth = _mm256_unpackhi_epi64(KP_BITS(odd), KP_BITS(odd_end));
  store_storage(to, KP_PARTS(first, second, 0x20));
  store_storage(to + 8, KP_PARTS(third, fourth, 0x20));
  store_storage(to + 16, KP_PARTS(first, second, 0x31));
  store_storage(to + 24, KP_PARTS(third, fourth, 0x31));
#else
#define KP_BITS(v) reinterpret_cast<__m128i>(v)
  store_storage(to, _mm_unpacklo_epi64(KP_BITS(even), KP_BITS(even_end)));
  store_storage(to + 4, _mm_unpacklo_epi64(KP_BITS(odd), KP_BITS(odd_end)));
  store_storage(to + 8, _mm_unpackhi_epi64(KP_BITS(even), KP_BITS(even_end)));
  store_storage(to + 12, _mm_unpackhi_epi64(KP_BITS(odd), KP_BITS(odd_end)));
#endif
#undef KP_BITS
#undef KP_PARTS
}

// Words of kGroups * kLanes consecutive blocks, in their order.
template <int kGroups>
KP_PRIMITIVE void philox_groups(uint64_t seed, uint64_t offset, uint64_t first_block, uint32_t* to) {
  constexpr int kStates = 2 * kGroups;  // the even blocks of a group, then its odd ones
  VecU64 counter;
  for (int i = 0; i < kDoubleLanes; ++i) counter[i] = first_block + 2 * static_cast<uint64_t>(i);
  VecU64 x0[kStates], x1[kStates], x2[kStates], x3[kStates];
#pragma GCC unroll 4
  for (int i = 0; i < kStates; ++i) {
    x0[i] = counter + static_cast<uint64_t>(i / 2 * kLanes + i % 2);
    x1[i] = upper_words(x0[i]);
    x2[i] = VecU64{} + offset;
    x3[i] = VecU64{} + (offset >> 32);
  }
  auto key0 = static_cast<uint32_t>(seed), key1 = static_cast<uint32_t>(seed >> 32);
#pragma GCC unroll 7
  for (int round = 0; round < kPhiloxRounds; ++round) {
#pragma GCC unroll 4
    for (int i = 0; i < kStates; ++i) {
      const VecU64 product0 = multiply_lower(x0[i], 0xd2511f53u), product1 = multiply_lower(x2[i], 0xcd9e8d57u);
      x0[i] = upper_words(product1) ^ x1[i] ^ uint64_t { key0 };
      x1[i] = product1;
      x2[i] = upper_words(product0) ^ x3[i] ^ uint64_t { key1 };
      x3[i] = product0;
    }
    key0 += 0x9e3779b9;
    key1 += 0xbb67ae85;
  }
#pragma GCC unroll 2
  for (int i = 0; i < kStates; i += 2) {
    store_blocks(to + i / 2 * kLanes * 4, join_lower(x0[i], x1[i]), join_lower(x2[i], x3[i]),
                 join_lower(x0[i + 1], x1[i + 1]), join_lower(x2[i + 1], x3[i + 1]));
  }
}

// Words of kLanes consecutive blocks, in their order: 8 * kLanes elements of 16 bits.
KP_PRIMITIVE void philox_blocks(uint64_t seed, uint64_t offset, uint64_t first_block, uint32_t* to) {
  philox_groups<1>(seed, offset, first_block, to);
}

#else

struct WideProduct {
  VecU low;
  VecU high;
};

// The 64-bit products of the lanes with a factor, in halves.
KP_PRIMITIVE WideProduct multiply_wide(VecU v, uint32_t factor) {
#if defined(__ARM_FEATURE_SVE)
  const SveWords high = svmulh_n_u32_x(svptrue_b32(), SveWords(v), factor);
  return {v * factor, VecU(high)};
#else
  const uint32x4_t even = vreinterpretq_u32_u64(vmull_n_u32(vget_low_u32(v), factor));
  const uint32x4_t odd = vreinterpretq_u32_u64(vmull_high_n_u32(v, factor));
  return {vuzp1q_u32(even, odd), vuzp2q_u32(even, odd)};
#endif
}

// Writes the lanes of four vectors in turn: a[0] b[0] c[0] d[0] a[1] ...
KP_PRIMITIVE void store_interleaved(uint32_t* to, VecU a, VecU b, VecU c, VecU d) {
#if defined(__ARM_FEATURE_SVE)
  svst4_u32(svptrue_b32(), to, svcreate4_u32(SveWords(a), SveWords(b), SveWords(c), SveWords(d)));
#else
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

#endif

// As many blocks as are drawn fastest at once: with 32 registers two groups, whose rounds do not wait for each other.
#if defined(__AVX512F__)
constexpr int kPhiloxBlocks = 2 * kLanes;
KP_PRIMITIVE void philox_many(uint64_t seed, uint64_t offset, uint64_t first_block, uint32_t* to) {
  philox_groups<2>(seed, offset, first_block, to);
}
#else
constexpr int kPhiloxBlocks = kLanes;
KP_PRIMITIVE void philox_many(uint64_t seed, uint64_t offset, uint64_t first_block, uint32_t* to) {
  philox_blocks(seed, offset, first_block, to);
}
#endif

}  // namespace KP_ISA_NAMESPACE
}  // namespace kernel_pytorch::cpu
