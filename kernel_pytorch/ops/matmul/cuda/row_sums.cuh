// Sums over the rows of a 16-bit matrix [m, k], one pass over memory. Rows begin at multiples of 16 bytes. sm_80.
#pragma once

#include "kernel_pytorch/cuda/tile/vector.cuh"
#include "kernel_pytorch/ops/matmul/cuda/row_sums_cuda.h"

namespace kernel_pytorch::matmul {

// k is dense: a warp takes a row.
template <class T>
__global__ void __launch_bounds__(kRowSumThreads) row_sums_along(const __grid_constant__ RowSumArguments arguments) {
  constexpr int kCount = tile::Vector<T>::kCount;
  const int64_t row = static_cast<int64_t>(blockIdx.x) * (kRowSumThreads / 32) + threadIdx.x / 32;
  const int32_t lane = static_cast<int32_t>(threadIdx.x % 32);
  if (row >= arguments.m) return;
  const T* data = static_cast<const T*>(arguments.a) + row * arguments.stride;
  float sum = 0.0f;
  int32_t k = lane * kCount;
  for (; k + kCount <= arguments.k; k += 32 * kCount) {
    float values[kCount];
    tile::load_once<T>(data + k).unpack(values);
#pragma unroll
    for (int i = 0; i < kCount; ++i) sum += values[i];
  }
  for (; k < arguments.k && k < (arguments.k / kCount + 1) * kCount; ++k) sum += tile::to_float(data[k]);
#pragma unroll
  for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, step);
  if (lane != 0) return;
  if (arguments.float_totals) {
    static_cast<float*>(arguments.totals)[row] = sum;
  } else {
    static_cast<T*>(arguments.totals)[row] = tile::from_float<T>(sum);
  }
}

// m is dense: a block takes 256 rows of a slice of k, a thread eight of them.
template <class T>
__global__ void __launch_bounds__(kRowSumThreads) row_sums_across(const __grid_constant__ RowSumArguments arguments) {
  constexpr int kCount = tile::Vector<T>::kCount;
  static_assert(kCount * 32 == kRowSumWidth && 32 * kRowSumLanes == kRowSumThreads);
  __shared__ float shared[kRowSumLanes][kRowSumWidth];
  const int32_t lane = static_cast<int32_t>(threadIdx.x / 32);
  const int32_t within = static_cast<int32_t>(threadIdx.x % 32) * kCount;
  const int32_t row = static_cast<int32_t>(blockIdx.x) * kRowSumWidth + within;
  const int32_t end = min(arguments.k, static_cast<int32_t>(blockIdx.y + 1) * arguments.slice);
  const T* data = static_cast<const T*>(arguments.a) + row;
  float sums[kCount] = {};
#pragma unroll 4
  for (int32_t k = static_cast<int32_t>(blockIdx.y) * arguments.slice + lane; k < end; k += kRowSumLanes) {
    float values[kCount];
    tile::load_once_if<T>(row + kCount <= arguments.m, data + k * arguments.stride).unpack(values);
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      if (row + kCount > arguments.m && row + i < arguments.m)
        values[i] = tile::to_float(data[k * arguments.stride + i]);
      sums[i] += values[i];
    }
  }
#pragma unroll
  for (int i = 0; i < kCount; ++i) shared[lane][within + i] = sums[i];
  __syncthreads();
  const int32_t mine = static_cast<int32_t>(blockIdx.x) * kRowSumWidth + static_cast<int32_t>(threadIdx.x);
  if (mine >= arguments.m) return;
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < kRowSumLanes; ++i) sum += shared[i][threadIdx.x];
  arguments.partials[static_cast<int64_t>(blockIdx.y) * arguments.m + mine] = sum;
}

}  // namespace kernel_pytorch::matmul
