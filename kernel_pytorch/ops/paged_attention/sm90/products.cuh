// The two products of a step with keys as rows: scores^T = K Q^T and output^T += V^T P^T by mma.m16n8k16, so that eight
// query rows are a whole operand. Codes of keys become fp16 by instruction, which is exact, and meet queries in fp16;
// codes of values become numbers by moving bits (cuda/products.cuh), since weights may need the range of bf16. Two
// units of the multiprocessor share the work so.
#pragma once

#include "kernel_pytorch/ops/paged_attention/cuda/products.cuh"

namespace kernel_pytorch::paged_attention {

template <class Element, bool kCodes>
struct QueryElementOf {
  using Type = Element;
};
template <class Element>
struct QueryElementOf<Element, true> {
  using Type = tile::Float16;
};
template <class Element, class Cache>
using QueryElement = typename QueryElementOf<Element, kIsCode<Cache>>::Type;

// Scores of kKeys keys with kRows rows, [key tile of 16][row tile of 8][4]. Columns of the queries stand as
// query_column says.
template <class Element, class Cache, int kKeys, int kRows, int kSize, int kPitch>
__device__ __forceinline__ void multiply_keys_by_rows(float (&scores)[kKeys / 16][kRows / 8][4], uint32_t keys,
                                                      const uint32_t (&queries)[kSize / 16][kRows / 8][2]) {
  const int32_t lane = static_cast<int32_t>(threadIdx.x % 32);
#pragma unroll
  for (int depth = 0; depth < kSize / 16; ++depth) {
#pragma unroll
    for (int tile = 0; tile < kKeys / 16; ++tile) {
      uint32_t left[4];
      if constexpr (kIsCode<Cache>) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const uint32_t from = keys + (tile * 16 + half * 8 + lane / 4) * kPitch + lane % 4 * 4 + depth * 16;
          const uint32_t codes = __float_as_uint(ptx::ld_shared_f32(from));
          left[half] = ptx::cvt_rn_f16x2_e4m3x2(static_cast<uint16_t>(codes));
          left[2 + half] = ptx::cvt_rn_f16x2_e4m3x2(static_cast<uint16_t>(codes >> 16));
        }
      } else {
        ptx::ldmatrix_x4(left, keys + (tile * 16 + lane % 16) * kPitch + lane / 16 * 16 + depth * 32);
      }
#pragma unroll
      for (int row = 0; row < kRows / 8; ++row) {
        tile::multiply_fragments<QueryElement<Element, Cache>>(scores[tile][row], left, queries[depth][row][0],
                                                               queries[depth][row][1]);
      }
    }
  }
}
// The columns whose pair of numbers is word `word` of a lane's operand of queries.
template <class Cache>
__device__ __forceinline__ int query_column(int lane, int depth, int word) {
  return depth * 16 + (kIsCode<Cache> ? lane % 4 * 4 + word * 2 : lane % 4 * 2 + word * 8);
}

// Adds the values of kKeys keys, weighed, to [column tile of 16][row tile of 8][4].
template <class Element, class Cache, int kKeys, int kRows, int kSize, int kPitch>
__device__ __forceinline__ void multiply_values_by_rows(float (&output)[kSize / 16][kRows / 8][4],
                                                        const float (&weights)[kKeys / 16][kRows / 8][4],
                                                        uint32_t values) {
  const int32_t lane = static_cast<int32_t>(threadIdx.x % 32);
#pragma unroll
  for (int tile = 0; tile < kKeys / 16; ++tile) {
    uint32_t right[kRows / 8][2];
#pragma unroll
    for (int row = 0; row < kRows / 8; ++row) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        right[row][half] = ptx::movmatrix_trans(tile::Word<Element>::pack(&weights[tile][row][2 * half]));
      }
    }
    if constexpr (kIsCode<Cache>) {  // a word of the transposed matrices holds two columns of two keys
      const uint32_t from = values + (tile * 16 + lane % 16) * kPitch + lane / 16 * 16;
#pragma unroll
      for (int n = 0; n < kSize / 32; ++n) {
        uint32_t codes[4];
        ptx::ldmatrix_x4_trans(codes, from + n * 32);
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          const uint32_t lower = codes[2 * j], upper = codes[2 * j + 1];
          const uint32_t left[4] = {numbers_of<Element>(lower << 8), numbers_of<Element>(lower),
                                    numbers_of<Element>(upper << 8), numbers_of<Element>(upper)};
#pragma unroll
          for (int row = 0; row < kRows / 8; ++row) {
            tile::multiply_fragments<Element>(output[2 * n + j][row], left, right[row][0], right[row][1]);
          }
        }
      }
    } else {
      const uint32_t from = values + (tile * 16 + lane / 16 * 8 + lane % 8) * kPitch + lane / 8 % 2 * 16;
#pragma unroll
      for (int n = 0; n < kSize / 16; ++n) {
        uint32_t left[4];
        ptx::ldmatrix_x4_trans(left, from + n * 32);
#pragma unroll
        for (int row = 0; row < kRows / 8; ++row) {
          tile::multiply_fragments<Element>(output[n][row], left, right[row][0], right[row][1]);
        }
      }
    }
  }
}
// The column of value of the accumulators `index` / 2 of a column tile.
template <class Cache>
__device__ __forceinline__ int output_column(int lane, int tile, int index) {
  return tile * 16 + (kIsCode<Cache> ? lane / 4 * 2 + index / 2 : lane / 4 + index / 2 * 8);
}

}  // namespace kernel_pytorch::paged_attention
