// Rows in fp32 that a call adds to (parts of a whole): a tile begins with them as other keys left them, counted as one
// key more, whose score is their lse and whose value is their output. Softmax then needs no merge at its end.
//
// A tile that is done again must not be added twice: a warp whose rows left the range of floats stores nothing until
// then, and one whose rows did not stores nothing then. Which of them it was is noted in global memory.
#pragma once

#include "kernel_pytorch/cuda/ptx/float_pairs.cuh"
#include "kernel_pytorch/ops/attention/sm90/forward/schedule.cuh"
#include "kernel_pytorch/ops/attention/sm90/forward/store.cuh"

namespace kernel_pytorch::attention {

// Accumulators times a factor a row. The four lanes of a row write a sector at a time.
template <int kCount>
__device__ __forceinline__ void store_float_rows(const OutputRows& rows, const float (&values)[kCount],
                                                 const float (&factors)[2]) {
#pragma unroll
  for (int row = 0; row < 2; ++row) {
    float* const target = static_cast<float*>(rows.output) + 8 * row * rows.row_stride + threadIdx.x % 4 * 2;
    const bool is_inside = 8 * row < rows.rows_left;
#pragma unroll
    for (int block = 0; block < kCount / 4; ++block) {  // of 8 columns
      const float* pair = values + 4 * block + 2 * row;
      ptx::st_global_v2_f32_if(is_inside && 8 * block < rows.value_size, target + 8 * block, pair[0] * factors[row],
                               pair[1] * factors[row]);
    }
  }
}
template <class Result, int kCount>
__device__ __forceinline__ void store_rows_as(const OutputRows& rows, const float (&values)[kCount],
                                              const float (&factors)[2]) {
  if constexpr (sizeof(Result) == 4) {
    store_float_rows(rows, values, factors);
  } else {
    store_rows<Result>(rows, values, factors);
  }
}

// The result of other keys; lse is -inf if there were none.
struct BegunRows {
  float lse[2];

  __device__ __forceinline__ explicit BegunRows(const OutputRows& rows) {
#pragma unroll
    for (int row = 0; row < 2; ++row) lse[row] = 8 * row < rows.rows_left ? rows.lse[8 * row] : tile::minus_infinity();
  }
  __device__ __forceinline__ bool has(int row) const {
    return lse[row] != tile::minus_infinity();
  }

  __device__ __forceinline__ void begin(SoftmaxRows& softmax) const {
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      softmax.shift[row] = -lse[row] * kLog2e;
      softmax.sum[row] = threadIdx.x % 4 == 0 && has(row) ? 1.0f : 0.0f;
    }
  }
  // They will be read soon.
  __device__ __forceinline__ void prefetch(const OutputRows& rows) const {
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      const float* const source = static_cast<float*>(rows.output) + 8 * row * rows.row_stride;
      for (int32_t column = threadIdx.x % 4 * 32; has(row) && column < rows.value_size; column += 128) {
        ptx::prefetch_global_l2(source + column);
      }
    }
  }
  // What they hold times a factor; of no keys it may be anything, and is not read.
  template <int kCount>
  __device__ __forceinline__ void load(float (&values)[kCount], const OutputRows& rows,
                                       const float (&factors)[2]) const {
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      const float* const source = static_cast<float*>(rows.output) + 8 * row * rows.row_stride + threadIdx.x % 4 * 2;
      const bool is_wanted = has(row) && 8 * row < rows.rows_left;
#pragma unroll
      for (int block = 0; block < kCount / 4; ++block) {
        float* pair = values + 4 * block + 2 * row;
        ptx::ld_global_v2_f32_if(is_wanted && 8 * block < rows.value_size, pair[0], pair[1], source + 8 * block);
      }
    }
#pragma unroll
    for (int i = 0; i < kCount; ++i) values[i] *= factors[i / 2 % 2];
  }
};

// Whether a warp's rows of a tile, complete now, go to memory. The same for all lanes.
__device__ __forceinline__ bool is_time_to_store(const Sm90ForwardArguments& arguments, const Sm90Tile& tile,
                                                 bool is_in_range, int32_t warp, int32_t warps) {
  if (!arguments.accumulates || arguments.careful) return true;
  volatile uint8_t* stored = arguments.stored + int64_t{place_of_tile(arguments, tile)} * warps + warp;
  if (tile.kind == TileKind::kRedo) return *stored == 0;
  if (threadIdx.x % 32 == 0) *stored = is_in_range;
  return is_in_range;
}

// A sink, to rows that these keys leave as they are.
__device__ __forceinline__ void add_sink(const OutputRows& rows, float sink) {
  BegunRows begun(rows);
  __syncwarp();
#pragma unroll
  for (int row = 0; row < 2; ++row) {
    const bool has_begun = begun.has(row);
    const RowEnd end = end_of_row(has_begun ? 1.0f : 0.0f, -begun.lse[row] * kLog2e, sink);
    begun.lse[row] = end.lse;
    if (8 * row >= rows.rows_left) continue;
    float* output = static_cast<float*>(rows.output) + 8 * row * rows.row_stride;
    for (int32_t column = static_cast<int32_t>(threadIdx.x % 4); column < rows.value_size; column += 4) {
      output[column] = (has_begun ? output[column] : 0.0f) * end.factor;
    }
  }
  store_lse(rows, begun.lse);
}

// Rows that see no key at all; `sink` is -inf for none.
template <Features kFeatures, class Result, int kColumns>
__device__ __forceinline__ void store_nothing(const Sm90ForwardArguments& arguments, const OutputRows& rows,
                                              float sink) {
  if (sizeof(Result) == 4 && arguments.accumulates) {
    if constexpr (kFeatures.sinks) add_sink(rows, sink);
    return;
  }
  const RowEnd end = end_of_row(0.0f, plus_infinity(), sink);
  const float zeros[kColumns / 2] = {};
  store_rows_as<Result>(rows, zeros, {end.factor, end.factor});  // NaN of a sink of NaN
  store_lse(rows, {end.lse, end.lse});
}

}  // namespace kernel_pytorch::attention
