// mma.m16n8k32 of 8-bit integers: a warp multiplies a 16 x 32 by a 32 x 8 matrix into int32 accumulators, exactly. A
// word is four neighbouring k: of the first operand rows lane / 4 and 8 further at k 4 * (lane % 4), then both at k 16
// further; of the second those k, and 16 further, of column lane / 4. Accumulators lie as those of m16n8k16. sm_80.
#pragma once

#include "kernel_pytorch/base/fixed_width.h"

namespace kernel_pytorch::ptx {

__device__ __forceinline__ void mma_m16n8k32_s32_s8(int32_t (&sum)[4], const uint32_t (&a)[4], uint32_t b0,
                                                    uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+r"(sum[0]), "+r"(sum[1]), "+r"(sum[2]), "+r"(sum[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

}  // namespace kernel_pytorch::ptx
