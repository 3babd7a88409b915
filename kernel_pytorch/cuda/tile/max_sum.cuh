// The largest score of a row and the sum of its exponentials, together: what softmax and cross entropy need of a row.
// Parts are summed around their own largest score and merged in an order fixed by the shape alone. No score counts as
// -inf; a NaN is lost by the maximum and found by the sum. Exponents are powers of two around round(largest * log2 e):
// one FMA and one ex2 a score, and the rounding is the same for all scores of a part.
#pragma once

#include "kernel_pytorch/base/fixed_width.h"
#include "kernel_pytorch/cuda/ptx/math.cuh"
#include "kernel_pytorch/cuda/tile/reduce.cuh"

namespace kernel_pytorch::tile {

inline constexpr float kLog2E = 1.44269504f;
__device__ __forceinline__ float minus_infinity() {
  return __int_as_float(0xff800000);
}

template <int kLanes>
__device__ __forceinline__ float max_lanes(float value) {
#pragma unroll
  for (int distance = kLanes / 2; distance > 0; distance /= 2) {
    value = fmaxf(value, __shfl_xor_sync(0xffffffffu, value, distance));
  }
  return value;
}

// What exponents are counted from.
__device__ __forceinline__ float exponent_center(float largest) {
  return largest == minus_infinity() ? 0.0f : __fmul_rn(largest, kLog2E);
}
// e^(score - largest) for scores of elements T, up to the center's rounding. In fp32 the exponent's own rounding would
// be the largest error: what it lost, found by two exact steps, multiplies the result.
template <class T>
__device__ __forceinline__ float exponential(float score, float center) {
  if constexpr (sizeof(T) < 4) {
    return ptx::ex2_approx_ftz_f32(fmaf(score, kLog2E, -center));
  } else {
    const float product = __fmul_rn(score, kLog2E), exponent = __fsub_rn(product, center);
    const float power = ptx::ex2_approx_ftz_f32(exponent);
    const float back = __fsub_rn(exponent, product);
    const float lost_by_sum = __fsub_rn(__fsub_rn(product, __fsub_rn(exponent, back)), __fadd_rn(center, back));
    const float lost = __fadd_rn(fmaf(score, kLog2E, -product), lost_by_sum);
    return exponent < -150.0f ? 0.0f : fmaf(power, lost * 0.693147181f, power);
  }
}

struct MaxSum {
  float largest;
  float sum;  // of exponential(score, center())

  __device__ __forceinline__ float center() const { return exponent_center(largest); }
  // log(sum of e^(score - largest)), without the center's rounding. The exact sum holds a term of 1, so what is nearer
  // to zero than a float's next step from 1 is zero.
  __device__ __forceinline__ float log_sum() const {
    const float rounding = largest == minus_infinity() ? 0.0f : fmaf(largest, kLog2E, -center());
    const float result = logf(sum) - rounding * 0.693147181f;
    return fabsf(result) < 0x1p-22f ? 0.0f : result;
  }
  // Counted from another center; nothing, where there was no score.
  __device__ __forceinline__ float sum_around(float other_center) const {
    return largest == minus_infinity() ? sum : sum * ptx::ex2_approx_ftz_f32(center() - other_center);
  }
  __device__ __forceinline__ void add(MaxSum other) {
    const float most = fmaxf(largest, other.largest);
    const float around = exponent_center(most);
    sum = sum_around(around) + other.sum_around(around);
    largest = most;
  }
};

// Over groups of kLanes neighbouring lanes; all lanes of the warp take part and receive the result.
template <int kLanes>
__device__ __forceinline__ MaxSum merge_lanes(MaxSum own) {
  const float most = max_lanes<kLanes>(own.largest);
  return {most, sum_lanes<kLanes>(own.sum_around(exponent_center(most)))};
}

// Parts as (largest, sum) pairs in shared memory, read by every warp.
__device__ __forceinline__ MaxSum merge_parts(const float (*parts)[2], int count) {
  MaxSum own{minus_infinity(), 0.0f};
  for (int other = threadIdx.x % kWarpLanes; other < count; other += kWarpLanes) {
    own.add({parts[other][0], parts[other][1]});
  }
  return merge_lanes<kWarpLanes>(own);
}

// Over the warps of a block: one __syncthreads, after which every thread has entered the call. Two buffers, so that the
// next call needs no barrier of its own.
template <int kWarps>
class BlockMaxSum {
 public:
  struct Storage {
    alignas(16) float parts[2][kWarps][2];
  };
  __device__ __forceinline__ explicit BlockMaxSum(Storage& storage) : storage_(storage) {}

  // `warp`: the same in all lanes of a warp.
  __device__ __forceinline__ MaxSum merge(MaxSum warp) {
    float(*parts)[2] = storage_.parts[buffer_];
    if (threadIdx.x % kWarpLanes == 0) {
      parts[threadIdx.x / kWarpLanes][0] = warp.largest;
      parts[threadIdx.x / kWarpLanes][1] = warp.sum;
    }
    __syncthreads();
    buffer_ ^= 1;
    return merge_parts(parts, kWarps);
  }

 private:
  Storage& storage_;
  int buffer_ = 0;
};

// Over the blocks of a cluster (sm_90), by ClusterSum's exchange.
template <int kWarps>
class ClusterMaxSum {
 public:
  using Storage = typename ClusterSum<kWarps, 2>::Storage;
  __device__ __forceinline__ explicit ClusterMaxSum(Storage& storage) : exchange_(storage) {}

  __device__ __forceinline__ MaxSum merge(MaxSum warp) {
    const float values[2] = {warp.largest, warp.sum};
    return merge_parts(exchange_.exchange(values), exchange_.parts());
  }

 private:
  ClusterSum<kWarps, 2> exchange_;
};

}  // namespace kernel_pytorch::tile
