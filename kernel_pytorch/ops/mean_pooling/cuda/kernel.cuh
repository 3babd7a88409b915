// The poolings on the GPU. Forward: the threads of a block share tokens and columns of one part of a mean; where parts
// are more than one, the block that finishes last adds them in their order, so that it is one launch and no result
// depends on timing. Backward: a scaled copy of the mean's gradient for each of its tokens.
#pragma once

#include "kernel_pytorch/cuda/tile/last_block.cuh"
#include "kernel_pytorch/cuda/tile/vector.cuh"
#include "kernel_pytorch/ops/mean_pooling/cuda/arguments_cuda.h"
#include "kernel_pytorch/ops/support/indices_cuda.h"

namespace kernel_pytorch::mean_pooling {

__device__ __forceinline__ int64_t offset_at(const Means& means, int64_t i) {
  const int64_t offset = index_at(means.offsets, means.offsets_are_wide, i);
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

// What a thread has of a row: a vector of columns, or one column of any stride.
template <class T, bool kVectors>
struct Columns {
  static constexpr int kCount = tile::Vector<T>::kCount;
  using Raw = tile::Vector<T>;
  static __device__ __forceinline__ Raw load(const T* row, int64_t column, int64_t = 1) {
    return tile::load_shared_by_all<T>(row + column);
  }
  static __device__ __forceinline__ Raw load_if(bool wanted, const T* row, int64_t column, int64_t) {
    return tile::load_shared_by_all_if<T>(wanted, row + column);
  }
  static __device__ __forceinline__ void store(T* row, int64_t column, const float (&values)[kCount]) {
    *reinterpret_cast<Raw*>(row + column) = Raw::pack(values);
  }
};
template <class T>
struct Columns<T, false> {
  static constexpr int kCount = 1;
  struct Raw {
    T value;
    __device__ __forceinline__ void unpack(float (&values)[1]) const { values[0] = tile::to_float<T>(value); }
  };
  static __device__ __forceinline__ Raw load(const T* row, int64_t column, int64_t stride = 1) {
    return {row[column * stride]};
  }
  static __device__ __forceinline__ Raw load_if(bool wanted, const T* row, int64_t column, int64_t stride) {
    return wanted ? load(row, column, stride) : Raw{tile::from_float<T>(0.0f)};
  }
  static __device__ __forceinline__ void store(T* row, int64_t column, const float (&values)[1]) {
    row[column] = tile::from_float<T>(values[0]);
  }
};

template <class Raw, int kCount>
__device__ __forceinline__ void add(const Raw& raw, float (&totals)[kCount]) {
  float values[kCount];
  raw.unpack(values);
#pragma unroll
  for (int k = 0; k < kCount; ++k) totals[k] += values[k];
}

template <class T, bool kVectors>
__global__ void __launch_bounds__(kThreads, kBlocksPerMultiprocessor)
    forward(const __grid_constant__ ForwardArguments arguments) {
  using Columns = Columns<T, kVectors>;
  constexpr int kCount = Columns::kCount;
  __shared__ float sums[kCount][kThreads];
  __shared__ bool is_last;
  const int lanes = arguments.lanes, groups = kThreads / lanes;
  const int lane = threadIdx.x % lanes, group = threadIdx.x / lanes;
  // In 32 bits, which hold every block's number: a division of 64 takes as long as a dozen vectors.
  const uint32_t parts = arguments.parts, inners = arguments.means.inner, means = arguments.means.count;
  const uint32_t block_row = blockIdx.x / parts, part = blockIdx.x - block_row * parts;
  const uint32_t mean_row = block_row / inners, inner = block_row - mean_row * inners;
  const uint32_t batch = mean_row / means, mean = mean_row - batch * means;
  const int64_t row = block_row, column = (static_cast<int64_t>(blockIdx.y) * lanes + lane) * kCount;
  const Range range = range_of(arguments.means, mean);
  const int64_t length = range.end - range.begin;
  const int64_t per_part = parts == 1 ? length : (length + parts - 1) / parts;
  const int64_t begin = range.begin + part * per_part;
  const int64_t end = min(begin + per_part, static_cast<long long>(range.end));
  const T* start = static_cast<const T*>(arguments.x) + batch * arguments.batch_stride + inner * arguments.inner_stride;

  float totals[kCount] = {};
  if (column < arguments.columns) {
    const T* token = start + (begin + group) * arguments.token_stride;
    const int64_t step = groups * arguments.token_stride;
    int64_t first = begin + group;
    for (; first + (kAhead - 1) * groups < end; first += kAhead * groups, token += kAhead * step) {
      typename Columns::Raw raw[kAhead];  // all are asked for before the first is used
#pragma unroll
      for (int i = 0; i < kAhead; ++i) raw[i] = Columns::load(token + i * step, column, arguments.column_stride);
#pragma unroll
      for (int i = 0; i < kAhead; ++i) add(raw[i], totals);
    }
    if (first < end) {  // fewer than kAhead are left
      typename Columns::Raw raw[kAhead];
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
        raw[i] = Columns::load_if(first + i * groups < end, token + i * step, column, arguments.column_stride);
      }
#pragma unroll
      for (int i = 0; i < kAhead; ++i) add(raw[i], totals);
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
  const float factor = length > 0 ? 1.0f / static_cast<float>(length) : 0.0f;
#pragma unroll
  for (float& total : totals) total *= factor;
  Columns::store(static_cast<T*>(arguments.output) + row * arguments.columns, column, totals);
}

// The sequence that holds a token, -1 where none does.
__device__ __forceinline__ int64_t mean_of(const Means& means, int64_t token) {
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

// Divides in 32 bits where that is enough, which the host knows.
__device__ __forceinline__ int64_t divide(int64_t value, int64_t by, bool is_small) {
  return is_small ? static_cast<uint32_t>(value) / static_cast<uint32_t>(by) : value / by;
}

// A group of lanes writes a token's row.
template <class T, bool kVectors>
__global__ void __launch_bounds__(kThreads) backward(const __grid_constant__ BackwardArguments arguments) {
  using Columns = Columns<T, kVectors>;
  const Means& means = arguments.means;
  const int lane = threadIdx.x % arguments.lanes, group = threadIdx.x / arguments.lanes;
  const int64_t row = static_cast<int64_t>(blockIdx.x) * (kThreads / arguments.lanes) + group;
  if (row >= arguments.rows) return;
  const int64_t token_row = means.inner == 1 ? row : divide(row, means.inner, arguments.is_small);
  const int64_t inner = row - token_row * means.inner;
  const int64_t batch = divide(token_row, means.tokens, arguments.is_small), token = token_row - batch * means.tokens;
  const int64_t mean =
      means.offsets == nullptr ? divide(token, means.chunk, arguments.is_small) : mean_of(means, token);
  float factor = 0;
  if (mean >= 0) {
    const Range range = range_of(means, mean);
    factor = 1.0f / static_cast<float>(range.end - range.begin);
  }
  const int64_t from = (batch * means.count + (mean >= 0 ? mean : 0)) * means.inner + inner;
  const T* source = static_cast<const T*>(arguments.grad_output) + from * arguments.columns;
  T* target = static_cast<T*>(arguments.grad_input) + row * arguments.columns;
#pragma unroll 4
  for (int64_t column = lane * Columns::kCount; column < arguments.columns;
       column += arguments.lanes * Columns::kCount) {
    float values[Columns::kCount] = {};
    if (mean >= 0) Columns::load(source, column).unpack(values);
#pragma unroll
    for (float& value : values) value *= factor;
    Columns::store(target, column, values);
  }
}

}  // namespace kernel_pytorch::mean_pooling
