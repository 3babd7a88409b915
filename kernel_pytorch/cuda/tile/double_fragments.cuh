// Products of fp64 fragments by whichever mma the GPU has: sixteen rows by four of k, times eight columns. sm_80.
#pragma once

#include "kernel_pytorch/cuda/ptx/double_mma.cuh"

namespace kernel_pytorch::tile {

// A lane has rows lane / 4 and that eight further of the first operand, at k lane % 4; column lane / 4 of the second;
// of each of the two rows the sums of columns 2 * (lane % 4) and the next.
__device__ __forceinline__ void multiply_doubles(double (&sum)[4], const double (&a)[2], double b) {
#if __CUDA_ARCH__ >= 900
  ptx::mma_m16n8k4_f64(sum, a, b);
#else
  ptx::mma_m8n8k4_f64(sum[0], sum[1], a[0], b);
  ptx::mma_m8n8k4_f64(sum[2], sum[3], a[1], b);
#endif
}

}  // namespace kernel_pytorch::tile
