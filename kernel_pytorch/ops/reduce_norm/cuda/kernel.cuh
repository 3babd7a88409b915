// The norm of a list: every block sums the squares of a chunk, the block that finishes last adds the chunks' sums in
// their order, in double, and takes the root. One launch for up to 1,024 tensors.
#pragma once

#include "kernel_pytorch/cuda/tile/last_block.cuh"
#include "kernel_pytorch/cuda/tile/reduce.cuh"
#include "kernel_pytorch/cuda/tile/vector.cuh"
#include "kernel_pytorch/ops/reduce_norm/cuda/arguments_cuda.h"

namespace kernel_pytorch::reduce_norm {

template <class T>
__device__ __forceinline__ float sum_squares(const void* tensor, int64_t begin, int count) {
  using Vector = tile::Vector<T>;
  constexpr int kUnroll = 8;
  const T* elements = static_cast<const T*>(tensor) + begin;
  float sums[4] = {0, 0, 0, 0};
  int done = 0;
  if (reinterpret_cast<uint64_t>(elements) % tile::kVectorBytes == 0) {
    const uint64_t policy = tile::make_policy(tile::Keep::kNormal);
    const int vectors = count / Vector::kCount;
    int i = threadIdx.x;
    for (; i + (kUnroll - 1) * kThreads < vectors; i += kUnroll * kThreads) {
      Vector loaded[kUnroll];
#pragma unroll
      for (int j = 0; j < kUnroll; ++j) {
        loaded[j] = tile::load_once<T>(elements + (i + j * kThreads) * Vector::kCount, policy);
      }
#pragma unroll
      for (int j = 0; j < kUnroll; ++j) {
        float values[Vector::kCount];
        loaded[j].unpack(values);
#pragma unroll
        for (int k = 0; k < Vector::kCount; ++k) sums[k % 4] += values[k] * values[k];
      }
    }
    for (; i < vectors; i += kThreads) {
      float values[Vector::kCount];
      tile::load_once<T>(elements + i * Vector::kCount, policy).unpack(values);
#pragma unroll
      for (int k = 0; k < Vector::kCount; ++k) sums[k % 4] += values[k] * values[k];
    }
    done = vectors * Vector::kCount;
  }
  for (int i = done + threadIdx.x; i < count; i += kThreads) {
    const float value = tile::to_float<T>(elements[i]);
    sums[0] += value * value;
  }
  return (sums[0] + sums[1]) + (sums[2] + sums[3]);
}

// In the block that came last: all partial sums, in an order that only their number decides.
__device__ __forceinline__ void finish(const Arguments& arguments) {
  __shared__ double strips[kThreads];
  const volatile float* partials = arguments.partials;
  double total = 0;
  for (int i = threadIdx.x; i < arguments.all_partials; i += kThreads) total += partials[i];
  strips[threadIdx.x] = total;
  __syncthreads();
  for (int half = kThreads / 2; half > 0; half /= 2) {
    if (threadIdx.x < half) strips[threadIdx.x] += strips[threadIdx.x + half];
    __syncthreads();
  }
  if (threadIdx.x == 0) *arguments.output = static_cast<float>(sqrt(strips[0]));
}

__global__ void __launch_bounds__(kThreads, 4) norm(const __grid_constant__ Arguments arguments) {
  using Sum = tile::BlockSum<kThreads / tile::kWarpLanes, 1>;
  __shared__ typename Sum::Storage storage;
  __shared__ bool is_last;
  const int chunk = blockIdx.x;
  const int tensor = tensor_of_chunk(chunk, arguments.tensors, [&](int i) { return arguments.chunk_end[i]; });
  const int first_chunk = tensor == 0 ? 0 : arguments.chunk_end[tensor - 1];
  const int64_t begin = static_cast<int64_t>(chunk - first_chunk) * kBlockElements;
  const int64_t left = arguments.elements[tensor] - begin;
  const int count = left < kBlockElements ? static_cast<int>(left) : kBlockElements;
  const void* data = arguments.data[tensor];

  float total[1] = {0};
  switch (arguments.type[tensor]) {
    case Element::kFloat:
      total[0] = sum_squares<float>(data, begin, count);
      break;
    case Element::kBFloat16:
      total[0] = sum_squares<tile::BFloat16>(data, begin, count);
      break;
    case Element::kFloat16:
      total[0] = sum_squares<tile::Float16>(data, begin, count);
      break;
  }
  Sum(storage).sum(total);
  if (threadIdx.x == 0) arguments.partials[arguments.first_partial + chunk] = total[0];
  if (arguments.arrived == nullptr) return;
  if (threadIdx.x == 0) is_last = tile::arrives_last(arguments.arrived, gridDim.x);
  __syncthreads();
  if (is_last) finish(arguments);
}

}  // namespace kernel_pytorch::reduce_norm
