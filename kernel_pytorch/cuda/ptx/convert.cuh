// Conversions between float and the low precisions, two at a time: the second operand lands in the low half.
// Round to nearest even; the FP8 forms saturate. NaN stays NaN.
#pragma once

#include "kernel_pytorch/base/fixed_width.h"

namespace kernel_pytorch::ptx {

// sm_80
__device__ __forceinline__ uint32_t cvt_rn_bf16x2_f32(float high, float low) {
  uint32_t pair;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}

// sm_80
__device__ __forceinline__ uint32_t cvt_rn_f16x2_f32(float high, float low) {
  uint32_t pair;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}

// sm_53
__device__ __forceinline__ float cvt_f32_f16(uint16_t bits) {
  float value;
  asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
  return value;
}

// sm_89
__device__ __forceinline__ uint16_t cvt_rn_satfinite_e4m3x2_f32(float high, float low) {
  uint16_t pair;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(high), "f"(low));
  return pair;
}

// sm_89
__device__ __forceinline__ uint16_t cvt_rn_satfinite_e5m2x2_f32(float high, float low) {
  uint16_t pair;
  asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(high), "f"(low));
  return pair;
}

// sm_89. Exact: every FP8 value is an fp16 value.
__device__ __forceinline__ uint32_t cvt_rn_f16x2_e4m3x2(uint16_t pair) {
  uint32_t fp16_pair;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(fp16_pair) : "h"(pair));
  return fp16_pair;
}

// sm_89
__device__ __forceinline__ uint32_t cvt_rn_f16x2_e5m2x2(uint16_t pair) {
  uint32_t fp16_pair;
  asm("cvt.rn.f16x2.e5m2x2 %0, %1;" : "=r"(fp16_pair) : "h"(pair));
  return fp16_pair;
}

}  // namespace kernel_pytorch::ptx
