// The two products of a step, by mma.m16n8k16, from shared memory.
//
// An FP8 cache costs no conversion by float: the seven low bits of a code, moved to bits 4 to 10 of a bf16 (7 to 13 of
// an fp16) with the sign on top, are the code's value times 2^-120 (2^-8), subnormals included. The factor is put back
// where it is free: bf16 queries carry 2^100 and weights too, the rest goes into the scale and into the last factor.
#pragma once

#include "kernel_pytorch/cuda/ptx/matrix_move.cuh"
#include "kernel_pytorch/cuda/ptx/memory.cuh"
#include "kernel_pytorch/cuda/tile/fragment.cuh"
#include "kernel_pytorch/cuda/tile/mma.cuh"

namespace kernel_pytorch::paged_attention {

template <class T>
inline constexpr bool kIsCode = sizeof(T) == 1;
template <class T>
inline constexpr bool kIsBFloat16 = false;
template <>
inline constexpr bool kIsBFloat16<tile::BFloat16> = true;

// Powers of two that codes in place of numbers ask for.
template <class Element, class Cache>
struct Powers {
  static constexpr bool kIsWide = kIsBFloat16<Element>;
  static constexpr float kQuery = kIsCode<Cache> && kIsWide ? 0x1p100f : 1.0f;
  static constexpr float kScore = !kIsCode<Cache> ? 1.0f : kIsWide ? 0x1p20f : 0x1p8f;
  static constexpr float kWeight = kIsCode<Cache> && kIsWide ? 0x1p100f : 1.0f;
  static constexpr float kOutput = kScore;
};

// Two codes in the high bytes of the halves of a word, as two numbers.
template <class Element>
__device__ __forceinline__ uint32_t numbers_of(uint32_t codes) {
  constexpr int kShift = kIsBFloat16<Element> ? 4 : 1;
  return (codes & 0x80008000u) | (codes & 0x7f007f00u) >> kShift;
}

// Scores of 16 rows with kKeys keys. `load` gives the fragment of a slice of the queries: kept, or read again.
template <class Element, class Cache, int kKeys, int kSize, int kPitch, class Load>
__device__ __forceinline__ void multiply_keys(float (&scores)[kKeys / 2], uint32_t keys, const Load& load) {
  const int32_t lane = static_cast<int32_t>(threadIdx.x % 32);
  auto* groups = reinterpret_cast<float(*)[4]>(scores);
#pragma unroll
  for (int depth = 0; depth < kSize / 16; ++depth) {
    uint32_t left[4];
    load(left, depth);
    if constexpr (kIsCode<Cache>) {
#pragma unroll
      for (int n = 0; n < kKeys / 8; ++n) {
        const uint32_t from = keys + (n * 8 + lane / 4) * kPitch + lane % 4 * 4;
        const uint32_t codes = __float_as_uint(ptx::ld_shared_f32(from + depth * 16));
        tile::multiply_fragments<Element>(groups[n], left, numbers_of<Element>(__byte_perm(codes, 0, 0x1404)),
                                          numbers_of<Element>(__byte_perm(codes, 0, 0x3424)));
      }
    } else {
#pragma unroll
      for (int pair = 0; pair < kKeys / 16; ++pair) {
        const uint32_t from = keys + (pair * 16 + lane % 8 + lane / 16 * 8) * kPitch + lane / 8 % 2 * 16;
        uint32_t right[4];
        ptx::ldmatrix_x4(right, from + depth * 32);
        tile::multiply_fragments<Element>(groups[2 * pair], left, right[0], right[1]);
        tile::multiply_fragments<Element>(groups[2 * pair + 1], left, right[2], right[3]);
      }
    }
  }
}

// Adds the values of kKeys keys, weighed. Of codes, even and odd columns have groups of their own: value_column.
template <class Element, class Cache, int kKeys, int kSize, int kPitch>
__device__ __forceinline__ void multiply_values(float (&output)[kSize / 2], const float (&scores)[kKeys / 2],
                                                uint32_t values) {
  const int32_t lane = static_cast<int32_t>(threadIdx.x % 32);
  auto* groups = reinterpret_cast<float(*)[4]>(output);
  uint32_t weights[kKeys / 4];
  tile::pack_fragment<Element>(weights, scores);
#pragma unroll
  for (int k = 0; k < kKeys / 16; ++k) {
    const uint32_t(&left)[4] = reinterpret_cast<const uint32_t(&)[4]>(weights[k * 4]);
    const uint32_t row = values + (k * 16 + lane % 16) * kPitch;
    if constexpr (kIsCode<Cache>) {  // a word of the transposed matrices holds two columns of two keys
#pragma unroll
      for (int n = 0; n < kSize / 32; ++n) {
        uint32_t codes[4];
        ptx::ldmatrix_x4_trans(codes, row + n * 32 + lane / 16 * 16);
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          const uint32_t lower = codes[2 * j], upper = codes[2 * j + 1];
          tile::multiply_fragments<Element>(groups[n * 4 + 2 * j], left, numbers_of<Element>(lower << 8),
                                            numbers_of<Element>(upper << 8));
          tile::multiply_fragments<Element>(groups[n * 4 + 2 * j + 1], left, numbers_of<Element>(lower),
                                            numbers_of<Element>(upper));
        }
      }
    } else {
#pragma unroll
      for (int n = 0; n < kSize / 16; ++n) {
        uint32_t right[4];
        ptx::ldmatrix_x4_trans(right, row + n * 32 + lane / 16 * 16);
        tile::multiply_fragments<Element>(groups[2 * n], left, right[0], right[1]);
        tile::multiply_fragments<Element>(groups[2 * n + 1], left, right[2], right[3]);
      }
    }
  }
}

// The column of value that accumulator `index` of a lane holds.
template <class Cache>
__device__ __forceinline__ int value_column(int lane, int index) {
  if constexpr (!kIsCode<Cache>) return tile::fragment_column(lane, index);
  return index / 8 * 16 + (lane % 4 * 2 + index % 2) * 2 + index / 4 % 2;
}

}  // namespace kernel_pytorch::paged_attention
