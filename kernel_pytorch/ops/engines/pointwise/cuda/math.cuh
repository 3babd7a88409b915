// The functions and their derivatives on floats. For fp32 rows they are the C library's; for 16-bit rows they are made
// of the special unit's 2^x and 1/x, which is what lets the kernels keep up with memory: gelu is within 6e-7 and 2^-15
// of the value, the others within a few of fp32's last places.
#pragma once

#include "kernel_pytorch/cuda/ptx/math.cuh"
#include "kernel_pytorch/ops/engines/pointwise/kind_cuda.h"

namespace kernel_pytorch::pointwise {

inline constexpr float kLog2OfE = 1.44269504f;
inline constexpr float kGeluSlope = 0.797884561f;  // sqrt(2 / pi)
inline constexpr float kGeluCube = 0.044715f;

// 1 / (1 + 2^-x) of an argument already scaled by log2(e).
__device__ __forceinline__ float fast_sigmoid2(float negative_x) {
  return ptx::rcp_approx_ftz_f32(1.0f + ptx::ex2_approx_ftz_f32(negative_x));
}

// Probability of a normal variable below x, as sigmoid(x q(x^2)): q is a fit of ours to logit(cdf(x)) / x for |x| < 6.
__device__ __forceinline__ float fast_normal_below(float x) {
  const float square = fminf(x * x, 36.0f);
  float q = 1.00539702e-10f;
  q = q * square - 1.10942988e-08f;
  q = q * square + 5.13931354e-07f;
  q = q * square - 1.27834646e-05f;
  q = q * square + 0.000166053374f;
  q = q * square + 8.1023536e-05f;
  q = q * square - 0.104829609f;
  q = q * square - 2.30220461f;  // already times -log2(e)
  return fast_sigmoid2(x * q);
}

__device__ __forceinline__ float fast_tanh(float x) {
  const float small = x - x * x * x * (1.0f / 3);
  const float large = 1.0f - 2.0f * fast_sigmoid2(2 * kLog2OfE * x);
  return fabsf(x) < 0.1f ? small : large;
}

template <bool kAccurate>
__device__ __forceinline__ float sigmoid(float x) {
  if constexpr (kAccurate) return 1.0f / (1.0f + expf(-x));
  return fast_sigmoid2(-kLog2OfE * x);
}

// A sigmoid s and its derivative s (1 - s). In fp32, with l the larger of s and 1 - s: where l is near 1, 1 - l would
// have lost its digits, and what multiplies it may be large; near 1/2 the error of l hardly changes l (1 - l).
struct Sigmoid {
  float value;
  float derivative;
};
template <bool kAccurate>
__device__ __forceinline__ Sigmoid sigmoid_with_derivative(float x) {
  if constexpr (kAccurate) {
    const float e = expf(-fabsf(x)), larger = 1.0f / (1.0f + e), smaller = e * larger;
    return {x < 0.0f ? smaller : larger, larger * (larger < 0.75f ? 1.0f - larger : smaller)};
  }
  const float s = sigmoid<false>(x);
  return {s, s - s * s};
}

template <bool kAccurate>
__device__ __forceinline__ float normal_below(float x) {
  if constexpr (kAccurate) return 0.5f * (1.0f + erff(x * 0.707106781f));
  return fast_normal_below(x);
}

template <bool kAccurate>
__device__ __forceinline__ float normal_density(float x) {
  constexpr float kScale = 0.398942280f;
  if constexpr (kAccurate) return kScale * expf(-0.5f * x * x);
  return kScale * ptx::ex2_approx_ftz_f32(-0.5f * kLog2OfE * x * x);
}

template <Kind kKind, bool kAccurate>
__device__ __forceinline__ float function(float x) {
  if constexpr (kKind == Kind::kGelu) return x * normal_below<kAccurate>(x);
  // (1 + tanh(u)) / 2 = sigmoid(2 u)
  if constexpr (kKind == Kind::kGeluTanh) {
    return x * sigmoid<kAccurate>(x * (2 * kGeluSlope + 2 * kGeluSlope * kGeluCube * x * x));
  }
  if constexpr (kKind == Kind::kSilu) return x * sigmoid<kAccurate>(x);
  const float positive = x <= 0.0f ? 0.0f : x;  // a NaN is handed on
  if constexpr (kKind == Kind::kRelu) return positive;
  if constexpr (kKind == Kind::kReluSquared) return positive * positive;
  if constexpr (kKind == Kind::kSigmoid) return sigmoid<kAccurate>(x);
  if constexpr (kKind == Kind::kTanh) return kAccurate ? tanhf(x) : fast_tanh(x);
  return x;
}

struct Values {
  float value;
  float derivative;
};

template <Kind kKind, bool kAccurate>
__device__ __forceinline__ Values differentiate(float x) {
  if constexpr (kKind == Kind::kGelu) {
    const float below = normal_below<kAccurate>(x);
    return {x * below, below + x * normal_density<kAccurate>(x)};
  }
  if constexpr (kKind == Kind::kGeluTanh) {
    const float square = x * x;
    const float scaled = x * (2 * kGeluSlope + 2 * kGeluSlope * kGeluCube * square);
    const Sigmoid s = sigmoid_with_derivative<kAccurate>(scaled);
    const float inner = x * (2 * kGeluSlope + 6 * kGeluSlope * kGeluCube * square);
    return {x * s.value, s.value + inner * s.derivative};
  }
  if constexpr (kKind == Kind::kSilu) {
    const Sigmoid s = sigmoid_with_derivative<kAccurate>(x);
    return {x * s.value, s.value + x * s.derivative};
  }
  const float positive = x <= 0.0f ? 0.0f : x;
  if constexpr (kKind == Kind::kRelu) return {positive, x <= 0.0f ? 0.0f : 1.0f};
  if constexpr (kKind == Kind::kReluSquared) return {positive * positive, 2 * positive};
  if constexpr (kKind == Kind::kSigmoid) {
    const Sigmoid s = sigmoid_with_derivative<kAccurate>(x);
    return {s.value, s.derivative};
  }
  if constexpr (kKind == Kind::kTanh) {
    const float t = kAccurate ? tanhf(x) : fast_tanh(x);
    return {t, 1.0f - t * t};
  }
  return {x, 1.0f};
}

// The slope of gelu, phi(x) + x density(x), without the value: with a = |x| it is D or 1 - D, where D = exp(-a^2/2)
// q(a) and q is a fit of ours, which needs no reciprocal. Within 1e-6 and 2^-14 of the slope.
__device__ __forceinline__ float fast_gelu_slope(float x) {
  const float a = fabsf(x);
  float q = -0.000111868168f;
  q = q * a + 0.00172429485f;
  q = q * a - 0.0115168374f;
  q = q * a + 0.0451669954f;
  q = q * a - 0.120960228f;
  q = q * a + 0.245536312f;
  q = q * a - 0.797181487f;
  q = q * a + 0.499978721f;
  const float below = ptx::ex2_approx_ftz_f32(-0.5f * kLog2OfE * a * a) * q;
  return x < 0.0f ? below : 1.0f - below;
}

template <Kind kKind, bool kAccurate>
__device__ __forceinline__ float slope(float x) {
  if constexpr (kKind == Kind::kGelu && !kAccurate) return fast_gelu_slope(x);
  return differentiate<kKind, kAccurate>(x).derivative;
}

template <class T>
inline constexpr bool kIsAccurate = sizeof(T) == 4;

// Calls work(KindConstant<kind>()): the function is an argument of the kernel, not a kernel of its own.
template <Kind kKind>
struct KindConstant {
  static constexpr Kind value = kKind;
};
template <class Work>
__device__ __forceinline__ void with_kind(Kind kind, const Work& work) {
  switch (kind) {
    case Kind::kGelu:
      return work(KindConstant<Kind::kGelu>());
    case Kind::kGeluTanh:
      return work(KindConstant<Kind::kGeluTanh>());
    case Kind::kSilu:
      return work(KindConstant<Kind::kSilu>());
    case Kind::kRelu:
      return work(KindConstant<Kind::kRelu>());
    case Kind::kReluSquared:
      return work(KindConstant<Kind::kReluSquared>());
    case Kind::kSigmoid:
      return work(KindConstant<Kind::kSigmoid>());
    case Kind::kTanh:
      return work(KindConstant<Kind::kTanh>());
    case Kind::kIdentity:
      return work(KindConstant<Kind::kIdentity>());
  }
}

// Every value of an array, one switch for all of them.
template <bool kAccurate, int kCount>
__device__ __forceinline__ void apply(Kind kind, float (&values)[kCount]) {
  with_kind(kind, [&](auto constant) {
#pragma unroll
    for (float& value : values) value = function<constant.value, kAccurate>(value);
  });
}

}  // namespace kernel_pytorch::pointwise
