// Functions of the special unit: one instruction, about 22 good bits, an eighth of the rate of a multiplication.
// Denormals are taken and given as zero.
#pragma once

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

}  // namespace kernel_pytorch::ptx
