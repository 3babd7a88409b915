// Conversions between float and the low precisions: bf16 and FP8 by integers, fp16 by the GPU's own.
#pragma once

#include "kernel_pytorch/base/fixed_width.h"
#include "kernel_pytorch/hip/float8_cuda.h"

namespace kernel_pytorch::ptx {

__device__ __forceinline__ uint32_t bf16_bits(float value) {
  const uint32_t bits = __float_as_uint(value);
  const uint32_t rounded = (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16;
  return value != value ? 0x7fffu : rounded;
}

__device__ __forceinline__ uint32_t cvt_rn_bf16x2_f32(float high, float low) {
  return bf16_bits(high) << 16 | bf16_bits(low);
}

__device__ __forceinline__ uint32_t cvt_rn_f16x2_f32(float high, float low) {
  const uint32_t upper = __builtin_bit_cast(uint16_t, static_cast<_Float16>(high));
  return upper << 16 | __builtin_bit_cast(uint16_t, static_cast<_Float16>(low));
}

__device__ __forceinline__ float cvt_f32_f16(uint16_t bits) {
  return static_cast<float>(__builtin_bit_cast(_Float16, bits));
}

__device__ __forceinline__ uint16_t cvt_rn_satfinite_e4m3x2_f32(float high, float low) {
  return static_cast<uint16_t>(hip::to_e4m3(__float_as_uint(high)) << 8 | hip::to_e4m3(__float_as_uint(low)));
}

__device__ __forceinline__ uint16_t cvt_rn_satfinite_e5m2x2_f32(float high, float low) {
  return static_cast<uint16_t>(hip::to_e5m2(__float_as_uint(high)) << 8 | hip::to_e5m2(__float_as_uint(low)));
}

__device__ __forceinline__ uint32_t cvt_rn_f16x2_e4m3x2(uint16_t pair) {
  return hip::e4m3_to_f16(pair >> 8) << 16 | hip::e4m3_to_f16(pair & 0xffu);
}

__device__ __forceinline__ uint32_t cvt_rn_f16x2_e5m2x2(uint16_t pair) {
  return hip::e5m2_to_f16(pair >> 8) << 16 | hip::e5m2_to_f16(pair & 0xffu);
}

}  // namespace kernel_pytorch::ptx
