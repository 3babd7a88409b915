// A token's logits on a warp: lane i has experts i, 32 + i, 64 + i and so on, in registers.
#pragma once

#include "kernel_pytorch/cuda/ptx/math.cuh"
#include "kernel_pytorch/cuda/tile/element.cuh"
#include "kernel_pytorch/cuda/tile/max_sum.cuh"
#include "kernel_pytorch/cuda/tile/reduce.cuh"
#include "kernel_pytorch/ops/moe_routing/cuda/arguments_cuda.h"

namespace kernel_pytorch::moe_routing {

inline constexpr float kLog2OfE = 1.44269504f;
inline constexpr float kLeastSum = 1e-20f;

__device__ __forceinline__ float max_of_warp(float value) {
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) {
    value = fmaxf(value, __shfl_xor_sync(0xffffffffu, value, distance));
  }
  return value;
}

__device__ __forceinline__ float sigmoid_of(float x) {
  return 1.0f / (1.0f + ptx::ex2_approx_ftz_f32(-kLog2OfE * x));
}

template <int kPer>
struct Row {
  float scores[kPer];
  float most, sum;  // softmax is exp(x - most) / sum
  float lse, total;

  __device__ __forceinline__ float softmax_of(float x) const {
    return ptx::ex2_approx_ftz_f32((x - most) * kLog2OfE) / sum;
  }
  __device__ __forceinline__ void compute(const float (&logits)[kPer], bool is_sigmoid) {
    most = tile::minus_infinity();
#pragma unroll
    for (int i = 0; i < kPer; ++i) most = fmaxf(most, logits[i]);
    most = max_of_warp(most);
    sum = 0.0f;
#pragma unroll
    for (int i = 0; i < kPer; ++i) {
      scores[i] = ptx::ex2_approx_ftz_f32((logits[i] - most) * kLog2OfE);
      sum += scores[i];
    }
    sum = tile::sum_lanes<32>(sum);
    lse = most + __logf(sum);
    total = 1.0f;
    if (is_sigmoid) {
      total = 0.0f;
#pragma unroll
      for (int i = 0; i < kPer; ++i) {
        scores[i] = sigmoid_of(logits[i]);
        total += scores[i];
      }
      total = tile::sum_lanes<32>(total);
    } else {
      const float factor = 1.0f / sum;
#pragma unroll
      for (int i = 0; i < kPer; ++i) scores[i] *= factor;
    }
  }
};

template <class T, int kPer>
__device__ __forceinline__ void load_logits(const void* data, int64_t offset, int32_t experts, float (&logits)[kPer]) {
  const T* from = static_cast<const T*>(data) + offset;
  const int32_t lane = static_cast<int32_t>(threadIdx.x % 32);
#pragma unroll
  for (int i = 0; i < kPer; ++i) {
    const int32_t expert = 32 * i + lane;
    logits[i] = expert < experts ? tile::to_float(from[expert]) : tile::minus_infinity();
  }
}

}  // namespace kernel_pytorch::moe_routing
