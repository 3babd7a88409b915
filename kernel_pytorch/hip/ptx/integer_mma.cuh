// mma of bytes: hip/fragments.cuh says by what; four of them meet in one instruction.
#pragma once

#include "kernel_pytorch/base/fixed_width.h"
#include "kernel_pytorch/hip/fragments.cuh"

namespace kernel_pytorch::ptx {

__device__ __forceinline__ void mma_m16n8k32_s32_s8(int32_t (&sum)[4], const uint32_t (&a)[4], uint32_t b0,
                                                    uint32_t b1) {
  hip::for_each_product(sum, a, b0, b1, [&](int i, uint32_t left, uint32_t right) {
    sum[i] = __builtin_amdgcn_sdot4(static_cast<int>(left), static_cast<int>(right), sum[i], false);
  });
}

}  // namespace kernel_pytorch::ptx
