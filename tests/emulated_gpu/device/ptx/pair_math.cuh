// Pairs of 16-bit floats, emulated: a product of two is exact in double, and so the sum is rounded once.
#pragma once

#include "kernel_pytorch/base/fixed_width.h"
#include "kernel_pytorch/cuda/ptx/convert.cuh"

namespace kernel_pytorch::ptx {

// To the nearest float, ties and inexact values to the odd neighbour: rounding that again is as if rounded once.
inline float emulated_round_to_odd(double value) {
  const float nearest = static_cast<float>(value);
  const double back = static_cast<double>(nearest);
  if (back == value || value != value || __builtin_isinf(nearest)) return nearest;
  const uint32_t bits = __float_as_uint(nearest);
  if ((bits & 1u) != 0) return nearest;
  const bool is_beyond = (nearest < 0) == (back < value) && nearest != 0;  // rounded away from zero
  return __uint_as_float(is_beyond ? bits - 1 : bits + 1);
}
inline float emulated_bf16(uint32_t bits) {
  return __uint_as_float(bits << 16);
}
inline uint32_t fma_rn_bf16x2(uint32_t a, uint32_t b, uint32_t c) {
  uint32_t halves[2];
  for (int i = 0; i < 2; ++i) {
    const double product = static_cast<double>(emulated_bf16(a >> 16 * i & 0xffffu)) *
                           static_cast<double>(emulated_bf16(b >> 16 * i & 0xffffu));
    const double sum = product + static_cast<double>(emulated_bf16(c >> 16 * i & 0xffffu));
    halves[i] = emulated_bf16_bits(emulated_round_to_odd(sum));
  }
  return halves[1] << 16 | halves[0];
}
inline uint32_t fma_rn_f16x2(uint32_t a, uint32_t b, uint32_t c) {
  uint32_t halves[2];
  for (int i = 0; i < 2; ++i) {
    const double product = static_cast<double>(cvt_f32_f16(static_cast<uint16_t>(a >> 16 * i))) *
                           static_cast<double>(cvt_f32_f16(static_cast<uint16_t>(b >> 16 * i)));
    const double sum = product + static_cast<double>(cvt_f32_f16(static_cast<uint16_t>(c >> 16 * i)));
    halves[i] = emulated_f16_bits(emulated_round_to_odd(sum));
  }
  return halves[1] << 16 | halves[0];
}
inline uint32_t lop3_and_or(uint32_t a, uint32_t b, uint32_t c) {
  return (a & b) | c;
}
inline uint32_t prmt(uint32_t a, uint32_t b, uint32_t selector) {
  const uint64_t bytes = static_cast<uint64_t>(b) << 32 | a;
  uint32_t result = 0;
  for (int i = 0; i < 4; ++i) {
    const uint32_t nibble = selector >> 4 * i & 15u;
    uint32_t byte = static_cast<uint32_t>(bytes >> (nibble & 7u) * 8) & 0xffu;
    if ((nibble & 8u) != 0) byte = (byte & 0x80u) != 0 ? 0xffu : 0u;
    result |= byte << 8 * i;
  }
  return result;
}
inline uint32_t abs_bf16x2(uint32_t a) {
  return a & 0x7fff7fffu;
}
inline uint32_t max_nan_bf16x2(uint32_t a, uint32_t b) {
  uint32_t halves[2];
  for (int i = 0; i < 2; ++i) {
    const uint32_t first = a >> 16 * i & 0xffffu, second = b >> 16 * i & 0xffffu;
    const float x = emulated_bf16(first), y = emulated_bf16(second);
    halves[i] = x != x || y != y ? 0x7fffu : x > y ? first : second;
  }
  return halves[1] << 16 | halves[0];
}
inline uint32_t set_gt_u32_bf16x2(uint32_t a, uint32_t b) {
  const uint32_t low = emulated_bf16(a & 0xffffu) > emulated_bf16(b & 0xffffu) ? 0xffffu : 0u;
  const uint32_t high = emulated_bf16(a >> 16) > emulated_bf16(b >> 16) ? 0xffff0000u : 0u;
  return high | low;
}

}  // namespace kernel_pytorch::ptx
