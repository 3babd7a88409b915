// Rounding bf16 to E2M1 two values at a time. The seven boundaries between codes are bf16 numbers here: x > b and
// x >= b for a number b of more bits are x > t with the largest bf16 t that is not above b, or that is below it. So
// three comparisons of pairs find three bits, as exact as those of format_cuda.h, for a third of their instructions.
// sm_90.
#pragma once

#include "kernel_pytorch/cuda/ptx/pair_math.cuh"
#include "kernel_pytorch/ops/support/group_format/format_cuda.h"

namespace kernel_pytorch::group_quantize {

class PairBoundaries {
 public:
  // Of a group's scale; one that is not above 0, or NaN, has the code 0 for every value: nothing is above NaN.
  explicit __device__ __forceinline__ PairBoundaries(float scale) {
    scale = scale > 0.0f ? scale : __uint_as_float(group_format::kNaNBits);
    quarter_ = above(0.25f * scale);
    three_quarters_ = from(0.75f * scale);
    five_quarters_ = above(1.25f * scale);
    seven_quarters_ = from(1.75f * scale);
    five_halves_ = above(2.5f * scale);
    seven_halves_ = from(3.5f * scale);
    five_ = above(5.0f * scale);
  }

  // The codes of two values, in the highest four bits of both halves, so that signs are where they were and each bit
  // takes one selection; what is below them is of no use.
  __device__ __forceinline__ uint32_t codes_of(uint32_t pair, uint32_t magnitudes) const {
    const uint32_t fours = ptx::set_gt_u32_bf16x2(magnitudes, seven_quarters_);
    const uint32_t twos = ptx::set_gt_u32_bf16x2(magnitudes, choose(fours, seven_halves_, three_quarters_));
    const uint32_t above_two = choose(fours, five_, five_quarters_), below_two = choose(fours, five_halves_, quarter_);
    const uint32_t ones = ptx::set_gt_u32_bf16x2(magnitudes, choose(twos, above_two, below_two));
    return choose(0xe000e000, choose(0xc000c000, choose(0x80008000, pair, fours), twos), ones);
  }

 private:
  static __device__ __forceinline__ uint32_t choose(uint32_t mask, uint32_t a, uint32_t b) {
    return (mask & a) | (~mask & b);
  }
  // x > boundary, and x >= boundary, as x > the upper half of bits.
  static __device__ __forceinline__ uint32_t above(float boundary) { return twice(__float_as_uint(boundary)); }
  static __device__ __forceinline__ uint32_t from(float boundary) { return twice(__float_as_uint(boundary) - 1); }
  static __device__ __forceinline__ uint32_t twice(uint32_t bits) { return __byte_perm(bits, 0, 0x3232); }

  uint32_t quarter_, three_quarters_, five_quarters_, seven_quarters_, five_halves_, seven_halves_, five_;
};

// 16 codes of eight pairs of neighbours as eight bytes: in each the lower half is the first of two.
__device__ __forceinline__ void join_codes(const uint32_t (&pairs)[8], uint32_t (&words)[2]) {
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const uint32_t first = __byte_perm(pairs[4 * i], pairs[4 * i + 1], 0x7351);
    const uint32_t last = __byte_perm(pairs[4 * i + 2], pairs[4 * i + 3], 0x7351);
    const uint32_t low = __byte_perm(first, last, 0x5410), high = __byte_perm(first, last, 0x7632);
    words[i] = (low >> 4 & 0x0f0f0f0f) | (high & 0xf0f0f0f0);
  }
}

}  // namespace kernel_pytorch::group_quantize
