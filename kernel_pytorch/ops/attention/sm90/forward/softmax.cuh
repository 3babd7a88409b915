// Softmax of a block of scores in registers, two rows a thread, without a maximum wherever possible.
//
// Softmax does not depend on the number that is subtracted in the exponent, and fp32 sums and bf16 probabilities keep
// their relative precision at any scale, so the largest score of the first block serves all later ones (fast blocks):
// no maximum, no shuffle, no rescaling. If the sums grow, they and the output are scaled down by a power of two, which
// rounds nothing. Only a score that exceeds everything before it by far (2^100) within one block leaves the range of
// floats; that stays visible in the sum, and the whole tile is done again with every block `careful`: the usual running
// maximum. Careful is also every block that needs a mask, and the first one.
#pragma once

#include "kernel_pytorch/cuda/ptx/math.cuh"
#include "kernel_pytorch/cuda/tile/element.cuh"
#include "kernel_pytorch/cuda/tile/max_sum.cuh"

namespace kernel_pytorch::attention {

// Sums beyond kGrowth are scaled down; sums beyond kLimit mean that a probability may have left the range of its type.
template <class T>
struct SumRange {
  static constexpr float kGrowth = 65536.0f;
  static constexpr float kLimit = 1e30f;
};
template <>
struct SumRange<tile::Float16> {
  static constexpr float kGrowth = 256.0f;
  static constexpr float kLimit = 32768.0f;
};

__device__ __forceinline__ float plus_infinity() {
  return __int_as_float(0x7f800000);
}
__device__ __forceinline__ float quad_max(float value) {
  value = fmaxf(value, __shfl_xor_sync(0xffffffffu, value, 1));
  return fmaxf(value, __shfl_xor_sync(0xffffffffu, value, 2));
}
__device__ __forceinline__ float quad_sum(float value) {
  value += __shfl_xor_sync(0xffffffffu, value, 1);
  return value + __shfl_xor_sync(0xffffffffu, value, 2);
}

// Two rows' reference and the thread's part of their sums.
struct SoftmaxRows {
  float shift[2];  // added in the exponent; +inf: nothing seen yet
  float sum[2];

  __device__ __forceinline__ void begin() {
    shift[0] = shift[1] = plus_infinity();
    sum[0] = sum[1] = 0;
  }

  // Scores (times `scale`, in base 2) become probabilities; `factors` is what the output so far must be multiplied by.
  template <int kCount>
  __device__ __forceinline__ void careful(float (&scores)[kCount], float scale, float (&factors)[2]) {
    float most[2] = {tile::minus_infinity(), tile::minus_infinity()};
#pragma unroll
    for (int i = 0; i < kCount; ++i) most[i / 2 % 2] = fmaxf(most[i / 2 % 2], scores[i]);
    float base[2];
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      const float lower = fminf(shift[row], -quad_max(most[row]) * scale);
      const bool is_empty = lower == plus_infinity();
      factors[row] = is_empty ? 1.0f : ptx::ex2_approx_ftz_f32(lower - shift[row]);
      shift[row] = lower;
      sum[row] *= factors[row];
      base[row] = is_empty ? 0.0f : lower;
    }
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      scores[i] = ptx::ex2_approx_ftz_f32(fmaf(scores[i], scale, base[i / 2 % 2]));
      sum[i / 2 % 2] += scores[i];
    }
  }

  template <int kCount>
  __device__ __forceinline__ void exponentials(float (&scores)[kCount], float scale) const {
#pragma unroll
    for (int i = 0; i < kCount; ++i) scores[i] = ptx::ex2_approx_ftz_f32(fmaf(scores[i], scale, shift[i / 2 % 2]));
  }
  // The same of scores to which `slope` times their key's place is added: `distance` is that of the thread's first key,
  // for its first row.
  template <int kCount>
  __device__ __forceinline__ void exponentials_along(float (&scores)[kCount], float scale, float slope,
                                                     int32_t distance) const {
    const float base[2] = {fmaf(slope, static_cast<float>(distance), shift[0]),
                           fmaf(slope, static_cast<float>(distance - 8), shift[1])};
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const float along = fmaf(slope, static_cast<float>(i / 4 * 8 + i % 2), base[i / 2 % 2]);
      scores[i] = ptx::ex2_approx_ftz_f32(fmaf(scores[i], scale, along));
    }
  }
  template <int kCount>
  __device__ __forceinline__ void add(const float (&probabilities)[kCount]) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) sum[i / 2 % 2] += probabilities[i];
  }

  // Before a fast block: true where the output so far must be multiplied by `factors` because sums have grown. For all
  // lanes of the warp alike.
  template <class T>
  __device__ __forceinline__ bool has_grown(float (&factors)[2]) {
    if (!__any_sync(0xffffffffu, fmaxf(sum[0], sum[1]) > SumRange<T>::kGrowth)) return false;
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      const float most = quad_max(sum[row]);
      // Out of range for good: what was already rounded to T cannot be scaled back.
      if (!(most < SumRange<T>::kLimit)) sum[row] = plus_infinity();
      const int exponent = most > 1.0f ? min((__float_as_int(most) >> 23) - 127, 126) : 0;
      factors[row] = __int_as_float((127 - exponent) << 23);
      shift[row] -= static_cast<float>(exponent);
      sum[row] *= factors[row];
    }
    return true;
  }
};

}  // namespace kernel_pytorch::attention
