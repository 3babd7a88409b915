// Functions of the transcendental unit: one instruction and about 23 good bits, a quarter of the rate of a
// multiplication. It takes and gives subnormal numbers as zero, but for the reciprocal and the roots.
#pragma once

// Of the device library that HIPRTC links; its headers declare only some.
extern "C" {
__device__ __attribute__((const)) float __ocml_native_exp2_f32(float);
}

namespace kernel_pytorch::ptx {

__device__ __forceinline__ float ex2_approx_ftz_f32(float x) {
  return __ocml_native_exp2_f32(x);
}
__device__ __forceinline__ float rcp_approx_ftz_f32(float x) {
  return __builtin_amdgcn_rcpf(x);
}
__device__ __forceinline__ float lg2_approx_ftz_f32(float x) {
  return __ocml_native_log2_f32(x);
}
// There is no such instruction: by the exponential, which loses the digits of small arguments, as the original does.
__device__ __forceinline__ float tanh_approx_f32(float x) {
  return 1.0f - 2.0f * __builtin_amdgcn_rcpf(1.0f + __ocml_native_exp2_f32(x * 2.88539008f));
}
__device__ __forceinline__ float sqrt_approx_ftz_f32(float x) {
  return __ocml_native_sqrt_f32(x);
}
__device__ __forceinline__ float rsqrt_approx_ftz_f32(float x) {
  return __builtin_amdgcn_rsqf(x);
}
__device__ __forceinline__ float sin_approx_ftz_f32(float x) {
  return __ocml_native_sin_f32(x);
}
__device__ __forceinline__ float cos_approx_ftz_f32(float x) {
  return __ocml_native_cos_f32(x);
}
__device__ __forceinline__ float min_nan_f32(float a, float b) {
  return a != a || b != b ? __uint_as_float(0x7fffffffu) : fminf(a, b);
}
__device__ __forceinline__ float max_nan_f32(float a, float b) {
  return a != a || b != b ? __uint_as_float(0x7fffffffu) : fmaxf(a, b);
}

}  // namespace kernel_pytorch::ptx
