// Philox on lanes: the bits of base/philox.h for a run of blocks, kDoubleLanes blocks at a time, in element order.
#pragma once

#include "kernel_pytorch/base/philox.h"
#include "kernel_pytorch/cpu/load_store.h"

namespace kernel_pytorch::pointwise::KP_ISA_NAMESPACE {

// The 64-bit products of the lower halves of each lane.
KP_WORD cpu::VecU64 multiply_wide(cpu::VecU64 a, uint32_t b) {
  const cpu::VecU64 factor = uint64_t{b} + cpu::VecU64{};
#if defined(__AVX512F__)
  return reinterpret_cast<cpu::VecU64>(
      _mm512_maskz_mul_epu32(0xff, reinterpret_cast<__m512i>(a), reinterpret_cast<__m512i>(factor)));
#elif defined(__AVX2__)
  return reinterpret_cast<cpu::VecU64>(
      _mm256_mul_epu32(reinterpret_cast<__m256i>(a), reinterpret_cast<__m256i>(factor)));
#elif defined(__x86_64__)
  return reinterpret_cast<cpu::VecU64>(_mm_mul_epu32(reinterpret_cast<__m128i>(a), reinterpret_cast<__m128i>(factor)));
#else
  return (a & 0xffffffffu) * factor;
#endif
}

// Two vectors with their elements in turn: the first half and the second.
#if defined(__AVX512F__)
#define KP_LOWER 0, 8, 1, 9, 2, 10, 3, 11
#define KP_UPPER 4, 12, 5, 13, 6, 14, 7, 15
#elif defined(__AVX2__)
#define KP_LOWER 0, 4, 1, 5
#define KP_UPPER 2, 6, 3, 7
#else
#define KP_LOWER 0, 2
#define KP_UPPER 1, 3
#endif

// Sixteen bits for each element of `blocks` blocks from `first_block` on; writes whole groups of kDoubleLanes blocks.
KP_WORD void fill_bits(uint64_t seed, uint64_t offset, uint64_t first_block, int64_t blocks, uint16_t* bits) {
  using cpu::VecU64;
  VecU64 lane;
  for (int i = 0; i < cpu::kDoubleLanes; ++i) lane[i] = static_cast<uint64_t>(i);
  for (int64_t done = 0; done < blocks; done += cpu::kDoubleLanes) {
    const VecU64 block = lane + (first_block + static_cast<uint64_t>(done));
    uint32_t key0 = static_cast<uint32_t>(seed), key1 = static_cast<uint32_t>(seed >> 32);
    // Only the lower half of each lane counts; what the upper halves hold is never read.
    VecU64 word0 = block, word1 = block >> 32, word2 = offset + VecU64{}, word3 = (offset >> 32) + VecU64{};
#pragma GCC unroll 10
    for (int round = 0; round < 10; ++round) {
      const VecU64 product0 = multiply_wide(word0, 0xd2511f53), product1 = multiply_wide(word2, 0xcd9e8d57);
      word0 = (product1 >> 32) ^ word1 ^ uint64_t { key0 };
      word1 = product1;
      word2 = (product0 >> 32) ^ word3 ^ uint64_t { key1 };
      word3 = product0;
      key0 += 0x9e3779b9;
      key1 += 0xbb67ae85;
    }
    const VecU64 low = (word0 & 0xffffffffu) | word1 << 32, high = (word2 & 0xffffffffu) | word3 << 32;
    uint16_t* to = bits + done * kPhiloxElements;
    cpu::store_storage(to, __builtin_shufflevector(low, high, KP_LOWER));
    cpu::store_storage(to + cpu::kDoubleLanes * kPhiloxElements / 2, __builtin_shufflevector(low, high, KP_UPPER));
  }
}

#undef KP_LOWER
#undef KP_UPPER

}  // namespace kernel_pytorch::pointwise::KP_ISA_NAMESPACE
