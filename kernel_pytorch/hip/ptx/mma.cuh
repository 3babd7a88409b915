// mma of floats: hip/fragments.cuh says by what.
#pragma once

#include "kernel_pytorch/base/fixed_width.h"
#include "kernel_pytorch/cuda/ptx/convert.cuh"
#include "kernel_pytorch/hip/fragments.cuh"

namespace kernel_pytorch::ptx {

__device__ __forceinline__ void mma_m16n8k16_f32_bf16(float (&sum)[4], const uint32_t (&a)[4], uint32_t b0,
                                                      uint32_t b1) {
  hip::for_each_product(a, b0, b1, [&](int i, uint32_t left, uint32_t right) {
    sum[i] = fmaf(__uint_as_float(left << 16), __uint_as_float(right << 16), sum[i]);
    sum[i] = fmaf(__uint_as_float(left & 0xffff0000u), __uint_as_float(right & 0xffff0000u), sum[i]);
  });
}

__device__ __forceinline__ void mma_m16n8k16_f32_f16(float (&sum)[4], const uint32_t (&a)[4], uint32_t b0,
                                                     uint32_t b1) {
  hip::for_each_product(a, b0, b1, [&](int i, uint32_t left, uint32_t right) {
    sum[i] = fmaf(cvt_f32_f16(static_cast<uint16_t>(left)), cvt_f32_f16(static_cast<uint16_t>(right)), sum[i]);
    sum[i] = fmaf(cvt_f32_f16(left >> 16), cvt_f32_f16(right >> 16), sum[i]);
  });
}

__device__ __forceinline__ void mma_m16n8k8_f32_tf32(float (&sum)[4], const uint32_t (&a)[4], uint32_t b0,
                                                     uint32_t b1) {
  hip::for_each_product(a, b0, b1, [&](int i, uint32_t left, uint32_t right) {
    sum[i] = fmaf(__uint_as_float(left & 0xffffe000u), __uint_as_float(right & 0xffffe000u), sum[i]);
  });
}

}  // namespace kernel_pytorch::ptx
