// Functions of the special unit, by those of the C library: more exact, subnormal numbers as zero.
#pragma once

#include "kernel_pytorch/base/fixed_width.h"

namespace kernel_pytorch::ptx {

inline float emulated_flushed(float x) {
  return fabsf(x) < 0x1p-126f ? copysignf(0.0f, x) : x;
}
inline float ex2_approx_ftz_f32(float x) {
  return emulated_flushed(exp2f(emulated_flushed(x)));
}
inline float rcp_approx_ftz_f32(float x) {
  return emulated_flushed(1.0f / emulated_flushed(x));
}
inline float lg2_approx_ftz_f32(float x) {
  return emulated_flushed(log2f(emulated_flushed(x)));
}
inline float tanh_approx_f32(float x) {
  return tanhf(x);
}
inline float sqrt_approx_ftz_f32(float x) {
  return emulated_flushed(sqrtf(emulated_flushed(x)));
}
inline float rsqrt_approx_ftz_f32(float x) {
  return emulated_flushed(rsqrtf(emulated_flushed(x)));
}
inline float sin_approx_ftz_f32(float x) {
  return sinf(x);
}
inline float cos_approx_ftz_f32(float x) {
  return cosf(x);
}
inline float min_nan_f32(float a, float b) {
  return a != a || b != b ? __uint_as_float(0x7fffffffu) : fminf(a, b);
}
inline float max_nan_f32(float a, float b) {
  return a != a || b != b ? __uint_as_float(0x7fffffffu) : fmaxf(a, b);
}

}  // namespace kernel_pytorch::ptx
