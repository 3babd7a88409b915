// The online softmax of the two rows that a thread shares with three others: the largest score so far, the sum of
// exponentials below it, and what earlier results must be multiplied by when a larger score comes. Scores are in base 2
// after a positive factor. -inf is no score; a row with none gives 0 and an lse of -inf.
#pragma once

#include "kernel_pytorch/cuda/ptx/math.cuh"
#include "kernel_pytorch/cuda/tile/max_sum.cuh"
#include "kernel_pytorch/ops/attention/cuda/arguments_cuda.h"

namespace kernel_pytorch::attention {

template <int kCount>
__device__ __forceinline__ void scale_rows(float (&values)[kCount], const float (&factors)[2]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) values[i] *= factors[i / 2 % 2];
}

// Results times what a larger score asks for: most steps bring none, and then nothing is done.
template <int kCount>
__device__ __forceinline__ void rescale_rows(float (&values)[kCount], const float (&factors)[2]) {
  if (__any_sync(0xffffffffu, factors[0] != 1.0f || factors[1] != 1.0f)) scale_rows(values, factors);
}

struct RowResult {
  float lse[2];  // natural
};

// The lse of a row, natural, from its largest score and the sum below it; `factor` turns sums of exponentials times
// values into results. `sink`: a logit more, in base 2.
template <bool kSink>
__device__ __forceinline__ float finish_row(float center, float sum, float sink, float& factor) {
  const bool is_empty = center == tile::minus_infinity();
  float shrink = 1.0f;
  if constexpr (kSink) {
    const float larger = fmaxf(center, sink);
    const float base = larger == tile::minus_infinity() ? 0.0f : larger;
    shrink = ptx::ex2_approx_ftz_f32(center - base);
    sum = sum * shrink + ptx::ex2_approx_ftz_f32(sink - base);
    center = base;
  }
  // A sink of NaN, which fmaxf passes over, is in the sum.
  factor = is_empty ? (kSink ? 0.0f * sum : 0.0f) : shrink / sum;
  return is_empty && !kSink ? tile::minus_infinity() : (center + ptx::lg2_approx_ftz_f32(sum)) * kLn2;
}

class OnlineSoftmax {
 public:
  // Scores become exponentials.
  template <int kCount>
  __device__ __forceinline__ void add(float (&scores)[kCount], float scale, float (&rescale)[2]) {
    float center[2];
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      float largest = tile::minus_infinity();
#pragma unroll
      for (int i = 2 * row; i < kCount; i += 4) largest = fmaxf(largest, fmaxf(scores[i], scores[i + 1]));
      largest = fmaxf(largest_[row], tile::max_lanes<4>(largest));
      const float base = largest == tile::minus_infinity() ? 0.0f : largest;
      center[row] = base * scale;
      // Exactly 1 where the largest score stays: a factor of its product's rounding error would grow with every tile.
      rescale[row] = ptx::ex2_approx_ftz_f32((largest_[row] - base) * scale);
      largest_[row] = largest;
      sum_[row] *= rescale[row];
    }
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      scores[i] = ptx::ex2_approx_ftz_f32(scores[i] * scale - center[i / 2 % 2]);
      sum_[i / 2 % 2] += scores[i];
    }
  }

  // The largest score of each of the two rows in base 2, and the sum of exponentials relative to it, over all four
  // threads.
  __device__ __forceinline__ void total(float scale, float (&center)[2], float (&sum)[2]) const {
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      sum[row] = sum_[row] + __shfl_xor_sync(0xffffffffu, sum_[row], 1);
      sum[row] += __shfl_xor_sync(0xffffffffu, sum[row], 2);
      center[row] = largest_[row] * scale;
    }
  }

  template <bool kSink>
  __device__ __forceinline__ RowResult finish(float scale, float sink, float (&factors)[2]) {
    RowResult result;
    float center[2], sum[2];
    total(scale, center, sum);
#pragma unroll
    for (int row = 0; row < 2; ++row) result.lse[row] = finish_row<kSink>(center[row], sum[row], sink, factors[row]);
    return result;
  }

 private:
  float largest_[2] = {tile::minus_infinity(), tile::minus_infinity()};
  float sum_[2] = {};
};

}  // namespace kernel_pytorch::attention
