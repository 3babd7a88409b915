// The words of generated functions (expression/cuda_text.h): scalar arithmetic with the meaning that
// expression/expression.h gives it, and elements of captured tensors. Floats by the special unit where it has about 20
// good bits: scores come from products of 8 or 11 bits.
#pragma once

#include "kernel_pytorch/base/fixed_width.h"
#include "kernel_pytorch/cuda/ptx/math.cuh"
#include "kernel_pytorch/cuda/tile/captures_cuda.h"
#include "kernel_pytorch/cuda/tile/element.cuh"

namespace kernel_pytorch::tile::scalar {

__device__ __forceinline__ float exp2(float x) {
  return ptx::ex2_approx_ftz_f32(x);
}
__device__ __forceinline__ float exp(float x) {
  return exp2(x * 1.44269504f);
}
__device__ __forceinline__ float log2(float x) {
  return ptx::lg2_approx_ftz_f32(x);
}
__device__ __forceinline__ float log(float x) {
  return log2(x) * 0.693147181f;
}
__device__ __forceinline__ float sqrt(float x) {
  return ptx::sqrt_approx_ftz_f32(x);
}
__device__ __forceinline__ float rsqrt(float x) {
  return ptx::rsqrt_approx_ftz_f32(x);
}
__device__ __forceinline__ float divide(float a, float b) {
  return __fdividef(a, b);
}
__device__ __forceinline__ float sigmoid(float x) {
  return ptx::rcp_approx_ftz_f32(1.0f + exp(-x));
}

// By the exponential, which loses the digits of small arguments: there the series.
__device__ __forceinline__ float tanh(float x) {
  const float square = x * x;
  const float small = x + x * square * (-0.333333333f + square * (0.133333333f - 0.0539682540f * square));
  const float large = 1.0f - 2.0f * ptx::rcp_approx_ftz_f32(1.0f + exp(2.0f * x));
  return fabsf(x) < 0.25f ? small : large;
}

// To [-pi, pi], in two steps: the absolute error is below 1e-6 up to 10,000 and grows with x beyond.
__device__ __forceinline__ float to_one_turn(float x) {
  const float turns = rintf(x * 0.159154943f);
  return fmaf(turns, 1.74845553e-7f, fmaf(turns, -6.28318548f, x));
}
__device__ __forceinline__ float sin(float x) {
  return ptx::sin_approx_ftz_f32(to_one_turn(x));
}
__device__ __forceinline__ float cos(float x) {
  return ptx::cos_approx_ftz_f32(to_one_turn(x));
}
__device__ __forceinline__ float erf(float x) {
  return erff(x);
}
__device__ __forceinline__ float pow(float x, float y) {
  return powf(x, y);
}
__device__ __forceinline__ float floor(float x) {
  return floorf(x);
}
__device__ __forceinline__ float floor_divide(float a, float b) {
  return floorf(a / b);
}
__device__ __forceinline__ float modulo(float a, float b) {
  const float rest = fmodf(a, b);
  return rest != 0.0f && (rest < 0.0f) != (b < 0.0f) ? rest + b : rest;
}
__device__ __forceinline__ float minimum(float a, float b) {
  return ptx::min_nan_f32(a, b);
}
__device__ __forceinline__ float maximum(float a, float b) {
  return ptx::max_nan_f32(a, b);
}
__device__ __forceinline__ float absolute(float x) {
  return fabsf(x);
}

// int32_t or int64_t.
template <class Integer>
__device__ __forceinline__ Integer floor_divide(Integer a, Integer b) {
  if (b == 0) return 0;
  if (b == -1) return static_cast<Integer>(0 - static_cast<uint64_t>(a));
  const Integer quotient = a / b;
  return quotient - (quotient * b != a && (a < 0) != (b < 0));
}
template <class Integer>
__device__ __forceinline__ Integer modulo(Integer a, Integer b) {
  if (b == 0 || b == -1) return 0;
  const Integer rest = a % b;
  return rest != 0 && (rest < 0) != (b < 0) ? rest + b : rest;
}
template <class Integer>
__device__ __forceinline__ Integer minimum(Integer a, Integer b) {
  return a < b ? a : b;
}
template <class Integer>
__device__ __forceinline__ Integer maximum(Integer a, Integer b) {
  return a > b ? a : b;
}
template <class Integer>
__device__ __forceinline__ Integer absolute(Integer a) {
  return a < 0 ? static_cast<Integer>(0 - static_cast<uint64_t>(a)) : a;
}
__device__ __forceinline__ int64_t shift_left(int64_t a, int64_t by) {
  return by < 0 || by > 63 ? 0 : static_cast<int64_t>(static_cast<uint64_t>(a) << by);
}
__device__ __forceinline__ int64_t shift_right(int64_t a, int64_t by) {
  return a >> (by < 0 || by > 63 ? 63 : by);
}
__device__ __forceinline__ int64_t to_int(float x) {
  return x != x ? 0 : static_cast<int64_t>(x);  // the conversion saturates
}

// The place of an index in a dimension: from the end where it is below zero, then the nearest there is.
template <class Integer>
__device__ __forceinline__ int32_t place_of(Integer index, int32_t size) {
  const Integer counted = index < 0 ? index + size : index;
  return static_cast<int32_t>(minimum(maximum(counted, Integer{0}), static_cast<Integer>(size - 1)));
}

template <class... Integers>
__device__ __forceinline__ int64_t offset_of(const CapturedTensor& tensor, Integers... indices) {
  int64_t offset = 0;
  int dimension = 0;
  ((offset += place_of(indices, tensor.sizes[dimension]) * tensor.strides[dimension], ++dimension), ...);
  return offset;
}
// In the gradient, which is contiguous.
template <class... Integers>
__device__ __forceinline__ int64_t gradient_offset_of(const CapturedTensor& tensor, Integers... indices) {
  int64_t offset = 0;
  int dimension = 0;
  ((offset = offset * tensor.sizes[dimension] + place_of(indices, tensor.sizes[dimension]), ++dimension), ...);
  return offset;
}

// An element as what it is computed with: float, int32_t, int64_t or bool.
template <class Element>
__device__ __forceinline__ Element element_at(const CapturedTensor& tensor, int64_t offset) {
  return static_cast<const Element*>(tensor.data)[offset];
}
template <class Element>
__device__ __forceinline__ float float_at(const CapturedTensor& tensor, int64_t offset) {
  return to_float(static_cast<const Element*>(tensor.data)[offset]);
}

}  // namespace kernel_pytorch::tile::scalar
