// Sums over the rows of each group: a block has a group and some columns, its threads every eighth row, whose sums they
// add up in a fixed order. sm_80.
#pragma once

#include "kernel_pytorch/cuda/tile/element.cuh"
#include "kernel_pytorch/ops/grouped_matmul/cuda/arguments_cuda.h"

namespace kernel_pytorch::grouped_matmul {

template <class T>
__global__ void __launch_bounds__(kThreads) sum(const __grid_constant__ SumArguments arguments) {
  __shared__ float parts[kSumLanes][kSumColumns];
  const int32_t group = static_cast<int32_t>(blockIdx.y);
  const auto end_of = [&](int32_t index) { return min(max(arguments.ends[index], 0), arguments.rows); };
  const int32_t begin = group == 0 ? 0 : end_of(group - 1), end = end_of(group);
  const int32_t pair = static_cast<int32_t>(threadIdx.x % (kSumColumns / 2)), lane = threadIdx.x / (kSumColumns / 2);
  const int32_t column = static_cast<int32_t>(blockIdx.x) * kSumColumns + 2 * pair;
  float sums[2] = {0.0f, 0.0f};
#pragma unroll 4
  for (int32_t row = begin + lane; row < end; row += kSumLanes) {
    const int64_t line = arguments.gather == nullptr ? row : arguments.gather[row];
    const float factor = arguments.factors == nullptr ? 1.0f : arguments.factors[row];
    const T* from = static_cast<const T*>(arguments.x) + line * arguments.stride + column;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (column + i < arguments.columns) sums[i] = fmaf(factor, tile::to_float(from[i]), sums[i]);
    }
  }
  parts[lane][2 * pair] = sums[0];
  parts[lane][2 * pair + 1] = sums[1];
  __syncthreads();
  const int32_t own = static_cast<int32_t>(blockIdx.x) * kSumColumns + static_cast<int32_t>(threadIdx.x);
  if (threadIdx.x >= kSumColumns || own >= arguments.columns) return;
  float total = 0.0f;
#pragma unroll
  for (int i = 0; i < kSumLanes; ++i) total += parts[i][threadIdx.x];
  const int64_t at = int64_t{group} * arguments.columns + own;
  if (arguments.is_float) {
    static_cast<float*>(arguments.output)[at] = total;
  } else {
    static_cast<T*>(arguments.output)[at] = tile::from_float<T>(total);
  }
}

}  // namespace kernel_pytorch::grouped_matmul
