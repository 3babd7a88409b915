// Two 16-bit floats in a word: fused products and sums, rounded once, subnormal numbers kept. sm_80.
#pragma once

#include "kernel_pytorch/base/fixed_width.h"

namespace kernel_pytorch::ptx {

__device__ __forceinline__ uint32_t fma_rn_bf16x2(uint32_t a, uint32_t b, uint32_t c) {
  uint32_t result;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(result) : "r"(a), "r"(b), "r"(c));
  return result;
}

__device__ __forceinline__ uint32_t fma_rn_f16x2(uint32_t a, uint32_t b, uint32_t c) {
  uint32_t result;
  asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(result) : "r"(a), "r"(b), "r"(c));
  return result;
}

// sm_50. (a & b) | c as one instruction, which two constants keep the compiler from.
__device__ __forceinline__ uint32_t lop3_and_or(uint32_t a, uint32_t b, uint32_t c) {
  uint32_t result;
  asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(result) : "r"(a), "r"(b), "r"(c));
  return result;
}

// sm_20. Four bytes of a and b by the lower three bits of each nibble; the fourth repeats the byte's sign instead.
__device__ __forceinline__ uint32_t prmt(uint32_t a, uint32_t b, uint32_t selector) {
  uint32_t result;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(result) : "r"(a), "r"(b), "r"(selector));
  return result;
}

// Both without their signs, of NaN too.
__device__ __forceinline__ uint32_t abs_bf16x2(uint32_t a) {
  uint32_t result;
  asm("abs.bf16x2 %0, %1;" : "=r"(result) : "r"(a));
  return result;
}

// The larger of each half; NaN where one of the two is.
__device__ __forceinline__ uint32_t max_nan_bf16x2(uint32_t a, uint32_t b) {
  uint32_t result;
  asm("max.NaN.bf16x2 %0, %1, %2;" : "=r"(result) : "r"(a), "r"(b));
  return result;
}

// sm_90. All bits of a half where a is larger, else none.
__device__ __forceinline__ uint32_t set_gt_u32_bf16x2(uint32_t a, uint32_t b) {
  uint32_t result;
  asm("set.gt.u32.bf16x2 %0, %1, %2;" : "=r"(result) : "r"(a), "r"(b));
  return result;
}

}  // namespace kernel_pytorch::ptx
