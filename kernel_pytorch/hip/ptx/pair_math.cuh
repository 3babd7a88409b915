// Two 16-bit floats in a word.
#pragma once

#include "kernel_pytorch/base/fixed_width.h"
#include "kernel_pytorch/cuda/ptx/convert.cuh"

namespace kernel_pytorch::ptx {

__device__ __forceinline__ float bf16_value(uint32_t word, int half) {
  return __uint_as_float(half == 0 ? word << 16 : word & 0xffff0000u);
}
// A product of two bf16 numbers is exact in float; the sum's rounding and then bf16's are nearly always one.
__device__ __forceinline__ uint32_t fma_rn_bf16x2(uint32_t a, uint32_t b, uint32_t c) {
  return cvt_rn_bf16x2_f32(fmaf(bf16_value(a, 1), bf16_value(b, 1), bf16_value(c, 1)),
                           fmaf(bf16_value(a, 0), bf16_value(b, 0), bf16_value(c, 0)));
}

__device__ __forceinline__ uint32_t fma_rn_f16x2(uint32_t a, uint32_t b, uint32_t c) {
  const auto half = [](uint32_t word, int shift) {
    return __builtin_bit_cast(_Float16, static_cast<uint16_t>(word >> shift));
  };
  const auto result = [&](int shift) -> uint32_t {
    const _Float16 sum = __builtin_fmaf16(half(a, shift), half(b, shift), half(c, shift));
    return __builtin_bit_cast(uint16_t, sum);
  };
  return result(16) << 16 | result(0);
}

__device__ __forceinline__ uint32_t lop3_and_or(uint32_t a, uint32_t b, uint32_t c) {
  return (a & b) | c;
}

__device__ __forceinline__ uint32_t prmt(uint32_t a, uint32_t b, uint32_t selector) {
  const uint64_t bytes = static_cast<uint64_t>(b) << 32 | a;
  uint32_t result = 0;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const uint32_t choice = selector >> (i * 4) & 0xfu;
    const uint32_t byte = static_cast<uint32_t>(bytes >> ((choice & 7u) * 8)) & 0xffu;
    result |= ((choice & 8u) == 0 ? byte : (byte & 0x80u) != 0 ? 0xffu : 0u) << (i * 8);
  }
  return result;
}

__device__ __forceinline__ uint32_t set_gt_u32_bf16x2(uint32_t a, uint32_t b) {
  return (bf16_value(a, 0) > bf16_value(b, 0) ? 0xffffu : 0u) |
         (bf16_value(a, 1) > bf16_value(b, 1) ? 0xffff0000u : 0u);
}

}  // namespace kernel_pytorch::ptx
