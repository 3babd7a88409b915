// Functions of the special unit: one instruction, about 22 good bits, an eighth of the rate of a multiplication.
// Denormals are taken and given as zero. Below them, minimum and maximum that hand a NaN on, and a choice of bytes.
#pragma once

#include "kernel_pytorch/base/fixed_width.h"

namespace kernel_pytorch::ptx {

// sm_75. 2^x
__device__ __forceinline__ float ex2_approx_ftz_f32(float x) {
  float power;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(x));
  return power;
}

// sm_20. 1 / x
__device__ __forceinline__ float rcp_approx_ftz_f32(float x) {
  float reciprocal;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(reciprocal) : "f"(x));
  return reciprocal;
}

// sm_20. The logarithm to base 2
__device__ __forceinline__ float lg2_approx_ftz_f32(float x) {
  float logarithm;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(logarithm) : "f"(x));
  return logarithm;
}

// sm_75. Absolute error below 2^-10.9; the special unit's rate.
__device__ __forceinline__ float tanh_approx_f32(float x) {
  float tangent;
  asm("tanh.approx.f32 %0, %1;" : "=f"(tangent) : "f"(x));
  return tangent;
}

// sm_20. The square root
__device__ __forceinline__ float sqrt_approx_ftz_f32(float x) {
  float root;
  asm("sqrt.approx.ftz.f32 %0, %1;" : "=f"(root) : "f"(x));
  return root;
}

// sm_20. 1 / sqrt(x)
__device__ __forceinline__ float rsqrt_approx_ftz_f32(float x) {
  float root;
  asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(root) : "f"(x));
  return root;
}

// sm_20. The absolute error is 2^-21 from -pi to pi and grows beyond.
__device__ __forceinline__ float sin_approx_ftz_f32(float x) {
  float sine;
  asm("sin.approx.ftz.f32 %0, %1;" : "=f"(sine) : "f"(x));
  return sine;
}

// sm_20. As the sine
__device__ __forceinline__ float cos_approx_ftz_f32(float x) {
  float cosine;
  asm("cos.approx.ftz.f32 %0, %1;" : "=f"(cosine) : "f"(x));
  return cosine;
}

// sm_80
__device__ __forceinline__ float min_nan_f32(float a, float b) {
  float least;
  asm("min.NaN.f32 %0, %1, %2;" : "=f"(least) : "f"(a), "f"(b));
  return least;
}

// sm_80
__device__ __forceinline__ float max_nan_f32(float a, float b) {
  float most;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(most) : "f"(a), "f"(b));
  return most;
}

// Four bytes of two words, chosen by nibbles; 8 in a nibble repeats the byte's sign instead.
__device__ __forceinline__ uint32_t prmt_b32(uint32_t a, uint32_t b, uint32_t selector) {
  uint32_t result;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(result) : "r"(a), "r"(b), "r"(selector));
  return result;
}

}  // namespace kernel_pytorch::ptx
