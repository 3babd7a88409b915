// The second step of a gradient over rows: sums the blocks' partial rows in a fixed order and rounds to the total's
// type. Launched so that it may be scheduled while the first step still runs; it waits before it reads.
#pragma once

#include "kernel_pytorch/cuda/tile/dependent_launch.cuh"
#include "kernel_pytorch/cuda/tile/element.cuh"
#include "kernel_pytorch/ops/support/column_sums_cuda.h"

namespace kernel_pytorch {

template <class T>
__global__ void __launch_bounds__(kSumThreads) add_partial_rows(const __grid_constant__ ColumnSumArguments arguments) {
  __shared__ float sums[kSumThreads];
  tile::wait_for_earlier_kernels();
  const float* partials = arguments.partials[blockIdx.y];
  if (partials == nullptr) return;
  const int thread = threadIdx.x, width = arguments.block_columns;
  const int64_t column = static_cast<int64_t>(blockIdx.x) * width + thread % width;
  float total = 0;
  if (column < arguments.columns) {
    const int step = kSumThreads / width;
#pragma unroll 8
    for (int row = thread / width; row < arguments.count; row += step) {
      total += partials[row * arguments.columns + column];
    }
  }
  sums[thread] = total;
  for (int half = kSumThreads / 2; half >= width; half /= 2) {
    __syncthreads();
    if (thread < half) sums[thread] += sums[thread + half];
  }
  if (thread >= width || column >= arguments.columns) return;
  static_cast<T*>(arguments.totals[blockIdx.y])[column] = tile::from_float<T>(sums[thread]);
}

}  // namespace kernel_pytorch
