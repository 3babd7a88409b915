// The poolings on the GPU. Forward: the threads of a block share tokens and columns of one part of a mean; where parts
// are more than one, the block that finishes last adds them in their order, so that it is one launch and no result
// depends on timing. Backward: a scaled copy, each thread four vectors.
#pragma once

#include "kernel_pytorch/cuda/tile/last_block.cuh"
#include "kernel_pytorch/cuda/tile/vector.cuh"
#include "kernel_pytorch/ops/mean_pooling/mean_pooling_cuda.h"

namespace kernel_pytorch::mean_pooling {

__device__ __forceinline__ int64_t offset_at(const Means& means, int64_t i) {
  const int64_t offset = means.offsets_are_wide ? static_cast<const int64_t*>(means.offsets)[i]
                                                : static_cast<const int32_t*>(means.offsets)[i];
  return min(max(offset, 0ll), static_cast<long long>(means.tokens));  // a wrong one reads no foreign memory
}

struct Range {
  int64_t begin, end;
};
__device__ __forceinline__ Range range_of(const Means& means, int64_t mean) {
  if (means.offsets != nullptr) {
    const int64_t begin = offset_at(means, mean);
    return {begin, max(begin, offset_at(means, mean + 1))};
  }
  return {mean * means.chunk, min((mean + 1) * means.chunk, static_cast<long long>(means.tokens))};
}

// A vector of columns, or one column of any stride.
template <class T, bool kVectors>
struct Columns {
  static constexpr int kCount = kVectors ? tile::Vector<T>::kCount : 1;
  static __device__ __forceinline__ void load(const T* row, int64_t column, int64_t stride, float (&values)[kCount]) {
    if constexpr (kVectors) {
      tile::load_shared_by_all<T>(row + column).unpack(values);
    } else {
      values[0] = tile::to_float<T>(row[column * stride]);
    }
  }
  static __device__ __forceinline__ void store(T* row, int64_t column, const float (&values)[kCount]) {
    if constexpr (kVectors) {
      *reinterpret_cast<tile::Vector<T>*>(row + column) = tile::Vector<T>::pack(values);
    } else {
      row[column] = tile::from_float<T>(values[0]);
    }
  }
};

template <class T, bool kVectors>
__global__ void __launch_bounds__(kThreads, 4) forward(const __grid_constant__ ForwardArguments arguments) {
  using Columns = Columns<T, kVectors>;
  constexpr int kCount = Columns::kCount, kAhead = 4;
  __shared__ float sums[kCount][kThreads];
  __shared__ bool is_last;
  const int lanes = arguments.lanes, groups = kThreads / lanes;
  const int lane = threadIdx.x % lanes, group = threadIdx.x / lanes;
  const int part = blockIdx.x % arguments.parts;
  const int64_t row = blockIdx.x / arguments.parts;
  const int64_t column = (static_cast<int64_t>(blockIdx.y) * lanes + lane) * kCount;
  const int64_t inner = row % arguments.means.inner, mean = row / arguments.means.inner % arguments.means.count;
  const int64_t batch = row / arguments.means.inner / arguments.means.count;
  const Range range = range_of(arguments.means, mean);
  const int64_t per_part = (range.end - range.begin + arguments.parts - 1) / arguments.parts;
  const int64_t begin = range.begin + part * per_part;
  const int64_t end = min(begin + per_part, static_cast<long long>(range.end));
  const T* start = static_cast<const T*>(arguments.x) + batch * arguments.batch_stride + inner * arguments.inner_stride;

  float totals[kCount] = {};
  if (column < arguments.columns) {
    for (int64_t first = begin + group; first < end; first += kAhead * groups) {
      float values[kAhead][kCount] = {};
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
        const int64_t token = first + i * groups;
        if (token < end) {
          Columns::load(start + token * arguments.token_stride, column, arguments.column_stride, values[i]);
        }
      }
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
#pragma unroll
        for (int k = 0; k < kCount; ++k) totals[k] += values[i][k];
      }
    }
  }
#pragma unroll
  for (int k = 0; k < kCount; ++k) sums[k][threadIdx.x] = totals[k];
  __syncthreads();
  for (int half = groups / 2; half > 0; half /= 2) {  // groups are a power of two
    if (group < half) {
#pragma unroll
      for (int k = 0; k < kCount; ++k) sums[k][threadIdx.x] += sums[k][threadIdx.x + half * lanes];
    }
    __syncthreads();
  }
  const bool writes = group == 0 && column < arguments.columns;
  if (writes) {
#pragma unroll
    for (int k = 0; k < kCount; ++k) totals[k] = sums[k][lane];
  }
  if (arguments.parts > 1) {
    float* partial = arguments.partials + row * arguments.parts * arguments.columns + column;
    if (writes) {
#pragma unroll
      for (int k = 0; k < kCount; ++k) partial[part * arguments.columns + k] = totals[k];
    }
    __syncthreads();
    if (threadIdx.x == 0) {
      is_last = tile::arrives_last(arguments.arrived + row * gridDim.y + blockIdx.y, arguments.parts);
    }
    __syncthreads();
    if (!is_last) return;
    if (writes) {
#pragma unroll
      for (float& total : totals) total = 0;
      const volatile float* others = partial;
      for (int other = 0; other < arguments.parts; ++other) {
#pragma unroll
        for (int k = 0; k < kCount; ++k) totals[k] += others[other * arguments.columns + k];
      }
    }
  }
  if (!writes) return;
  const float factor = range.end > range.begin ? 1.0f / static_cast<float>(range.end - range.begin) : 0.0f;
#pragma unroll
  for (float& total : totals) total *= factor;
  Columns::store(static_cast<T*>(arguments.output) + row * arguments.columns, column, totals);
}

// The mean of a token, -1 without one; with offsets the last sequence that begins at or before it.
__device__ __forceinline__ int64_t mean_of(const Means& means, int64_t token) {
  if (means.offsets == nullptr) return token / means.chunk;
  int64_t low = 0, high = means.count;
  while (low < high) {
    const int64_t middle = (low + high) / 2;
    if (offset_at(means, middle + 1) > token) {
      high = middle;
    } else {
      low = middle + 1;
    }
  }
  return low < means.count && offset_at(means, low) <= token ? low : -1;
}

template <class T, bool kVectors>
__global__ void __launch_bounds__(kThreads) backward(const __grid_constant__ BackwardArguments arguments) {
  using Columns = Columns<T, kVectors>;
  const Means& means = arguments.means;
  const int64_t columns = static_cast<int64_t>(arguments.row_vectors) * Columns::kCount;
  const int64_t all_vectors = arguments.rows * arguments.row_vectors;
  const int64_t first_vector = static_cast<int64_t>(blockIdx.x) * (kThreads * kBackwardVectors);
#pragma unroll
  for (int i = 0; i < kBackwardVectors; ++i) {
    const int64_t vector = first_vector + i * kThreads + threadIdx.x;
    if (vector >= all_vectors) return;
    const int64_t row = vector / arguments.row_vectors;
    const int64_t column = (vector - row * arguments.row_vectors) * Columns::kCount;
    const int64_t token_of_all = row / means.inner, inner = row - token_of_all * means.inner;
    const int64_t batch = token_of_all / means.tokens, token = token_of_all - batch * means.tokens;
    const int64_t mean = mean_of(means, token);
    float values[Columns::kCount] = {};
    if (mean >= 0) {
      const Range range = range_of(means, mean);
      const float factor = 1.0f / static_cast<float>(range.end - range.begin);
      const int64_t from = (batch * means.count + mean) * means.inner + inner;
      Columns::load(static_cast<const T*>(arguments.grad_output) + from * columns, column, 1, values);
#pragma unroll
      for (float& value : values) value *= factor;
    }
    Columns::store(static_cast<T*>(arguments.grad_input) + row * columns, column, values);
  }
}

}  // namespace kernel_pytorch::mean_pooling
