// The special-function unit: one instruction each, 16 lanes per clock and multiprocessor. Relative errors are about
// 2^-22 (ex2, lg2 away from 1, rcp); denormal inputs and results count as zero (ftz). sm_50.
#pragma once

namespace kernel_pytorch::ptx {

__device__ __forceinline__ float ex2_approx_ftz_f32(float x) {
  float result;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
}

__device__ __forceinline__ float lg2_approx_ftz_f32(float x) {
  float result;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
}

__device__ __forceinline__ float rcp_approx_ftz_f32(float x) {
  float result;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
}

}  // namespace kernel_pytorch::ptx
