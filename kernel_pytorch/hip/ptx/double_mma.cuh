// mma of doubles by multiplications of single numbers, as hip/fragments.cuh has them of shorter types. Which lane holds
// what stands in cuda/ptx/double_mma.cuh.
#pragma once

#include "kernel_pytorch/base/fixed_width.h"

namespace kernel_pytorch::ptx {

// Eight rows: of each lane two neighbouring columns.
__device__ __forceinline__ void mma_m8n8k4_f64(double& sum0, double& sum1, double a, double b) {
  const int lane = static_cast<int>(__lane_id()) % 32, row = lane / 4 * 4, column = lane % 4 * 8;
#pragma unroll 1  // as in mma.cuh
  for (int k = 0; k < 4; ++k) {
    const double left = __shfl_sync(0xffffffffu, a, row + k);
    sum0 = __builtin_fma(left, __shfl_sync(0xffffffffu, b, column + k), sum0);
    sum1 = __builtin_fma(left, __shfl_sync(0xffffffffu, b, column + 4 + k), sum1);
  }
}

__device__ __forceinline__ void mma_m16n8k4_f64(double (&sum)[4], const double (&a)[2], double b) {
  mma_m8n8k4_f64(sum[0], sum[1], a[0], b);
  mma_m8n8k4_f64(sum[2], sum[3], a[1], b);
}

}  // namespace kernel_pytorch::ptx
