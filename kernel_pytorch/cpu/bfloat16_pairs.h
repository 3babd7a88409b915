// Vectors of 32 bf16 elements, as the products of bf16 take them: neighbours of k in pairs, one pair in a lane.
#pragma once

#include "kernel_pytorch/cpu/load_store.h"
#include "kernel_pytorch/cpu/tile_product.h"

#if defined(__AVX512F__)

namespace kernel_pytorch::cpu {
inline namespace KP_ISA_NAMESPACE {

// Two vectors of fp32 as 32 bf16 in their order, and as pairs {low[i], high[i]}.
KP_PRIMITIVE VecU to_bfloat16(Vec low, Vec high) {
#if defined(__AVX512BF16__)
  return reinterpret_cast<VecU>(
      _mm512_maskz_cvtne2ps_pbh(0xffffffff, reinterpret_cast<__m512>(high), reinterpret_cast<__m512>(low)));
#else
  return reinterpret_cast<VecU>(float_to_bfloat16_pair(low, high));
#endif
}
KP_PRIMITIVE VecU16x2 interleave_low_high(VecU16x2 v) {
  return __builtin_shufflevector(v, v, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23, 8, 24, 9, 25, 10, 26, 11,
                                 27, 12, 28, 13, 29, 14, 30, 15, 31);
}
KP_PRIMITIVE VecU to_bfloat16_pairs(Vec low, Vec high) {
#if defined(__AVX512BF16__)
  return reinterpret_cast<VecU>(interleave_low_high(reinterpret_cast<VecU16x2>(to_bfloat16(low, high))));
#else
  return join_bfloat16_unordered<false>({low, high});
#endif
}

KP_PRIMITIVE void transpose_words(VecU (&words)[16]) {
  Vec rows[kLanes];
  for (int i = 0; i < 16; ++i) rows[i] = from_bits(words[i]);
  transpose(rows);
  for (int i = 0; i < 16; ++i) words[i] = bits_of(rows[i]);
}

// Two rows of 32 neighbours as pairs: of the first sixteen, and of the others.
struct Pairs {
  VecU low, high;
};
KP_PRIMITIVE Pairs interleave(VecU even, VecU odd) {
  const auto first = reinterpret_cast<VecU16x2>(even), second = reinterpret_cast<VecU16x2>(odd);
  return {
      reinterpret_cast<VecU>(__builtin_shufflevector(first, second, 0, 32, 1, 33, 2, 34, 3, 35, 4, 36, 5, 37, 6, 38, 7,
                                                     39, 8, 40, 9, 41, 10, 42, 11, 43, 12, 44, 13, 45, 14, 46, 15, 47)),
      reinterpret_cast<VecU>(__builtin_shufflevector(first, second, 16, 48, 17, 49, 18, 50, 19, 51, 20, 52, 21, 53, 22,
                                                     54, 23, 55, 24, 56, 25, 57, 26, 58, 27, 59, 28, 60, 29, 61, 30, 62,
                                                     31, 63))};
}

// sums[i] + a[2 i] b[2 i] + a[2 i + 1] b[2 i + 1]. The instruction takes numbers below the normal ones for 0.
KP_PRIMITIVE Vec add_dots(Vec sums, VecU a, VecU b) {
#if defined(__AVX512BF16__)
  return reinterpret_cast<Vec>(
      _mm512_dpbf16_ps(reinterpret_cast<__m512>(sums), reinterpret_cast<__m512bh>(a), reinterpret_cast<__m512bh>(b)));
#else
  return sums + from_bits(a << 16) * from_bits(b << 16) + from_bits(a & 0xffff0000u) * from_bits(b & 0xffff0000u);
#endif
}

}  // namespace KP_ISA_NAMESPACE
}  // namespace kernel_pytorch::cpu

#endif
