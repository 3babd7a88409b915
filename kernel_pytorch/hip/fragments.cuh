// Products of matrix fragments by multiplications of single numbers. AMD's matrix instructions (MFMA) are instructions
// of a whole wave: they would join two warps, which here may be at different places (GEMM's are not: hip/tile). So this
// is what plain FMA can do.
#pragma once

#include "kernel_pytorch/base/fixed_width.h"

namespace kernel_pytorch::hip {

// The word of a lane of this lane's group of four; `part` is a constant after unrolling.
__device__ __forceinline__ uint32_t of_quad(uint32_t word, int part) {
  const int own = static_cast<int>(word);
  switch (part) {
    case 0:
      return __builtin_amdgcn_mov_dpp(own, 0x00, 0xf, 0xf, true);
    case 1:
      return __builtin_amdgcn_mov_dpp(own, 0x55, 0xf, 0xf, true);
    case 2:
      return __builtin_amdgcn_mov_dpp(own, 0xaa, 0xf, 0xf, true);
    default:
      return __builtin_amdgcn_mov_dpp(own, 0xff, 0xf, 0xf, true);
  }
}

// For each of the lane's four sums of mma.m16n8 (tile/fragment.cuh) the words of both operands that meet there.
template <class Sum, class Add>
__device__ __forceinline__ void for_each_product(Sum (&sum)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1,
                                                 Add add) {
  const int lane = static_cast<int>(__lane_id()), column = (lane & 32) + lane % 4 * 8;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int b = static_cast<int>(half == 0 ? b0 : b1);
#pragma unroll
    for (int part = 0; part < 4; ++part) {
      uint32_t upper = of_quad(a[2 * half], part), lower = of_quad(a[2 * half + 1], part);
      const uint32_t left = take(b, column + part), right = take(b, column + 4 + part);
      // Not kept for the next product with this operand: that takes more registers than there are.
      keep_here(upper);
      keep_here(lower);
      add(0, upper, left);
      add(1, upper, right);
      add(2, lower, left);
      add(3, lower, right);
      // Sums that may wait keep the operands of many products in registers: attention's backward had 512, and spilled.
#pragma unroll
      for (Sum& value : sum) keep_here(value);
    }
  }
}

}  // namespace kernel_pytorch::hip
