// mma of floats: hip/fragments.cuh says by what.
#pragma once

#include "kernel_pytorch/base/fixed_width.h"
#include "kernel_pytorch/cuda/ptx/convert.cuh"
#include "kernel_pytorch/hip/fragments.cuh"

namespace kernel_pytorch::ptx {

__device__ __forceinline__ void mma_m16n8k16_f32_bf16(float (&sum)[4], const uint32_t (&a)[4], uint32_t b0,
                                                      uint32_t b1) {
  hip::for_each_product(sum, a, b0, b1, [&](int i, uint32_t left, uint32_t right) {
    sum[i] = fmaf(__uint_as_float(left << 16), __uint_as_float(right << 16), sum[i]);
    sum[i] = fmaf(__uint_as_float(left & 0xffff0000u), __uint_as_float(right & 0xffff0000u), sum[i]);
  });
}

__device__ __forceinline__ void mma_m16n8k16_f32_f16(float (&sum)[4], const uint32_t (&a)[4], uint32_t b0,
                                                     uint32_t b1) {
  hip::for_each_product(sum, a, b0, b1, [&](int i, uint32_t left, uint32_t right) {
    sum[i] = fmaf(cvt_f32_f16(static_cast<uint16_t>(left)), cvt_f32_f16(static_cast<uint16_t>(right)), sum[i]);
    sum[i] = fmaf(cvt_f32_f16(left >> 16), cvt_f32_f16(right >> 16), sum[i]);
  });
}

__device__ __forceinline__ void mma_m16n8k8_f32_tf32(float (&sum)[4], const uint32_t (&a)[4], uint32_t b0,
                                                     uint32_t b1) {
  // A loop: written out, the 48 products of a step of fp32 GEMM take HIPRTC minutes.
  const int lane = static_cast<int>(__lane_id()), row = lane & ~3, column = (lane & 32) + lane % 4 * 8;
  const auto number = [](uint32_t word, int from) {
    return __uint_as_float(static_cast<uint32_t>(hip::take(static_cast<int>(word), from)) & 0xffffe000u);
  };
#pragma unroll 1
  for (int part = 0; part < 4; ++part) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float upper = number(a[2 * half], row + part), lower = number(a[2 * half + 1], row + part);
      const uint32_t b = half == 0 ? b0 : b1;
      const float left = number(b, column + part), right = number(b, column + 4 + part);
      sum[0] = fmaf(upper, left, sum[0]);
      sum[1] = fmaf(upper, right, sum[1]);
      sum[2] = fmaf(lower, left, sum[2]);
      sum[3] = fmaf(lower, right, sum[3]);
    }
  }
}

}  // namespace kernel_pytorch::ptx
