// An fp32 number with tf32's 11 bits: the nearest, ties away from zero. Tensor cores read no more than those bits,
// which by itself cuts off. What would round to infinity is cut off, infinity stays, and a NaN stays one.
#pragma once

#include "kernel_pytorch/base/fixed_width.h"

namespace kernel_pytorch::product {

inline constexpr uint32_t kTf32HalfStep = 0x1000u;           // half of the last of 11 bits
inline constexpr uint32_t kTf32FirstOverflow = 0x7f7ff000u;  // from here on a finite number would round to infinity

// For tensor cores alone: the lower 13 bits, which they do not read, hold anything, and a NaN of those bits alone is
// read as an infinity.
__device__ __forceinline__ uint32_t rounded_for_tf32(uint32_t word) {
  return (word & 0x7fffffffu) < kTf32FirstOverflow ? word + kTf32HalfStep : word;
}

__device__ __forceinline__ float rounded_to_tf32(float value) {
  const uint32_t word = __float_as_uint(value);
  const bool is_nan = (word & 0x7fffffffu) > 0x7f800000u;
  return __uint_as_float(is_nan ? word | 0x00400000u : rounded_for_tf32(word) & 0xffffe000u);
}

}  // namespace kernel_pytorch::product
