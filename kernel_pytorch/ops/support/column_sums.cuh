// The second step of a gradient over rows: sums the blocks' partial rows in their order and rounds to the total's type.
// Launched so that it may be scheduled while the first step still runs; it waits before it reads.
#pragma once

#include "kernel_pytorch/cuda/tile/dependent_launch.cuh"
#include "kernel_pytorch/cuda/tile/element.cuh"
#include "kernel_pytorch/ops/support/column_sums_cuda.h"

namespace kernel_pytorch {

template <class T>
__global__ void __launch_bounds__(kSumColumns* kSumStrips)
    add_partial_rows(const __grid_constant__ ColumnSumArguments arguments) {
  __shared__ float strips[kSumStrips][kSumColumns];
  tile::wait_for_earlier_kernels();
  const float* partials = arguments.partials[blockIdx.y];
  if (partials == nullptr) return;
  const int lane = threadIdx.x % kSumColumns, strip = threadIdx.x / kSumColumns;
  const int64_t column = static_cast<int64_t>(blockIdx.x) * kSumColumns + lane;
  float total = 0;
  if (column < arguments.columns) {
#pragma unroll 4
    for (int row = strip; row < arguments.count; row += kSumStrips) total += partials[row * arguments.columns + column];
  }
  strips[strip][lane] = total;
  __syncthreads();
  if (strip != 0 || column >= arguments.columns) return;
  for (int other = 1; other < kSumStrips; ++other) total += strips[other][lane];
  static_cast<T*>(arguments.totals[blockIdx.y])[column] = tile::from_float<T>(total);
}

}  // namespace kernel_pytorch
