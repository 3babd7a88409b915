// The second step of a weight's gradient: sums the blocks' partial rows in their order and rounds to the weight's type.
// Launched so that it may be scheduled while the first step still runs; it waits before it reads.
#pragma once

#include "kernel_pytorch/cuda/tile/dependent_launch.cuh"
#include "kernel_pytorch/cuda/tile/element.cuh"
#include "kernel_pytorch/ops/row_norm/row_norm_cuda.h"

namespace kernel_pytorch::row_norm {

template <class T>
__global__ void __launch_bounds__(kReduceColumns* kReduceRows)
    reduce_partials(const __grid_constant__ ReduceArguments arguments) {
  __shared__ float strips[kReduceRows][kReduceColumns];
  tile::wait_for_earlier_kernels();
  const float* partials = arguments.partials[blockIdx.y];
  if (partials == nullptr) return;
  const int lane = threadIdx.x % kReduceColumns, strip = threadIdx.x / kReduceColumns;
  const int64_t column = static_cast<int64_t>(blockIdx.x) * kReduceColumns + lane;
  float total = 0;
  if (column < arguments.columns) {
#pragma unroll 4
    for (int row = strip; row < arguments.count; row += kReduceRows)
      total += partials[row * arguments.columns + column];
  }
  strips[strip][lane] = total;
  __syncthreads();
  if (strip != 0 || column >= arguments.columns) return;
  for (int other = 1; other < kReduceRows; ++other) total += strips[other][lane];
  static_cast<T*>(arguments.outputs[blockIdx.y])[column] = tile::from_float<T>(total);
}

}  // namespace kernel_pytorch::row_norm
