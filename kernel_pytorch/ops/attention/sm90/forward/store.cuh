// Stores a warp's finished rows to global memory, straight from registers: the four lanes that share a row exchange
// words, so that each lane holds 16 contiguous bytes, and rows beyond the sequence are not written.
#pragma once

#include "kernel_pytorch/cuda/ptx/memory.cuh"
#include "kernel_pytorch/cuda/tile/element.cuh"
#include "kernel_pytorch/ops/attention/sm90/forward/softmax.cuh"
#include "kernel_pytorch/ops/attention/sm90/forward/tile_cuda.h"

namespace kernel_pytorch::attention {

// Four lanes hold four words each: afterwards lane i holds every lane's word i, in the order of the lanes.
__device__ __forceinline__ ptx::Word4 transpose_quad(ptx::Word4 words) {
  const bool odd = threadIdx.x % 2 != 0, high = threadIdx.x / 2 % 2 != 0;
  const uint32_t first = __shfl_xor_sync(0xffffffffu, odd ? words.x : words.y, 1);
  const uint32_t second = __shfl_xor_sync(0xffffffffu, odd ? words.z : words.w, 1);
  if (odd) {
    words.x = first;
    words.z = second;
  } else {
    words.y = first;
    words.w = second;
  }
  const uint32_t third = __shfl_xor_sync(0xffffffffu, high ? words.x : words.z, 2);
  const uint32_t fourth = __shfl_xor_sync(0xffffffffu, high ? words.y : words.w, 2);
  if (high) {
    words.x = third;
    words.y = fourth;
  } else {
    words.z = third;
    words.w = fourth;
  }
  return words;
}

// Where a tile's rows go, for a thread whose first row is `query`.
struct OutputRows {
  void* output;  // of the first row, column 0
  float* lse;    // of the first row, or null
  int64_t row_stride;
  int32_t rows_left;  // rows of the sequence from the thread's first one on: its second is eight further
  int32_t value_size;
};

__device__ __forceinline__ OutputRows output_rows(const Sm90ForwardArguments& arguments, const Head& head,
                                                  int32_t query, int element_bytes) {
  const bool is_packed = arguments.score.query_offsets != nullptr;
  const int64_t row = head.first_query + query;
  const int64_t offset = (is_packed ? 0 : head.batch * arguments.output_batch) + head.head * arguments.output_head +
                         row * arguments.output_query;
  const int64_t lse_head = is_packed ? head.head : static_cast<int64_t>(head.batch) * arguments.score.heads + head.head;
  const int64_t lse_rows = is_packed ? arguments.score.query_tokens : head.queries;
  return {.output = static_cast<unsigned char*>(arguments.output) + offset * element_bytes,
          .lse = arguments.lse == nullptr ? nullptr : arguments.lse + lse_head * lse_rows + row,
          .row_stride = arguments.output_query,
          .rows_left = head.queries - query,
          .value_size = arguments.value_size};
}

// Accumulators times a factor a row, as T.
template <class T, int kCount>
__device__ __forceinline__ void store_rows(const OutputRows& rows, const float (&values)[kCount],
                                           const float (&factors)[2]) {
  const int32_t lane = static_cast<int32_t>(threadIdx.x % 4);
#pragma unroll
  for (int row = 0; row < 2; ++row) {
    T* const target = static_cast<T*>(rows.output) + 8 * row * rows.row_stride;
    const bool is_inside = 8 * row < rows.rows_left;
#pragma unroll
    for (int group = 0; group < kCount / 16; ++group) {  // of 32 columns
      uint32_t words[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float* pair = values + 16 * group + 4 * i + 2 * row;
        const float scaled[2] = {pair[0] * factors[row], pair[1] * factors[row]};
        words[i] = tile::Word<T>::pack(scaled);
      }
      const ptx::Word4 vector = transpose_quad({words[0], words[1], words[2], words[3]});
      const int32_t column = 32 * group + 8 * lane;
      ptx::st_global_v4_if(is_inside && column < rows.value_size, target + column, vector);
    }
  }
}

__device__ __forceinline__ void store_lse(const OutputRows& rows, const float (&lse)[2]) {
  if (rows.lse == nullptr || threadIdx.x % 4 != 0) return;
#pragma unroll
  for (int row = 0; row < 2; ++row) {
    if (8 * row < rows.rows_left) rows.lse[8 * row] = lse[row];
  }
}

// What a row's sum makes of it: the factor of its output and its lse. `sink` is the head's extra logit in base 2, -inf
// for none.
struct RowEnd {
  float factor, lse;
};
__device__ __forceinline__ RowEnd end_of_row(float sum, float shift, float sink) {
  const bool is_empty = shift == plus_infinity();
  const float base = is_empty ? -sink : shift;
  if (sink != tile::minus_infinity()) {
    const float exponent = sink + base;
    // A sink that outweighs everything leaves nothing of the row.
    if (exponent > 120.0f) return {0.0f, sink * kLn2};
    sum += ptx::ex2_approx_ftz_f32(exponent);
  } else if (is_empty) {
    return {0.0f, tile::minus_infinity()};
  }
  return {ptx::rcp_approx_ftz_f32(sum), (ptx::lg2_approx_ftz_f32(sum) - base) * kLn2};
}
// Factors of both rows of a thread, times `scale`; false if a sum left the range of floats.
template <class T>
__device__ __forceinline__ bool end_rows(const SoftmaxRows& rows, float sink, float scale, float (&factors)[2],
                                         float (&lse)[2]) {
  bool is_in_range = true;
#pragma unroll
  for (int row = 0; row < 2; ++row) {
    const float sum = quad_sum(rows.sum[row]);
    is_in_range = is_in_range && sum < SumRange<T>::kLimit;
    const RowEnd end = end_of_row(sum, rows.shift[row], sink);
    factors[row] = end.factor * scale;
    lse[row] = end.lse;
  }
  return is_in_range;
}

}  // namespace kernel_pytorch::attention
