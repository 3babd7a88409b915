// FP8 codes with a scale for each row, in one visit: a block has a row in registers, finds its magnitude and writes its
// codes. The tiles' way (kernel.cuh) reads x twice, since no tile knows a row. sm_89.
#pragma once

#include "kernel_pytorch/cuda/tile/vector.cuh"
#include "kernel_pytorch/ops/quantize/cuda/arguments_cuda.h"

namespace kernel_pytorch::quantize {

// The largest finite magnitude of some vectors, as a float's bits. Magnitudes have the order of their bits, so all are
// compared at once, two 16-bit ones an instruction; only where that finds an infinity or a NaN they are looked through.
template <class T, int kVectors>
__device__ __forceinline__ uint32_t finite_magnitude(const tile::Vector<T> (&vectors)[kVectors]) {
  constexpr int kCount = tile::Vector<T>::kCount;
  uint32_t largest = 0;
#pragma unroll
  for (const tile::Vector<T>& vector : vectors) {
    const ptx::Word4& words = vector.words;
    if constexpr (sizeof(T) == 2) {
      largest = __vmaxu2(largest, __vmaxu2(__vmaxu2(words.x & 0x7fff7fff, words.y & 0x7fff7fff),
                                           __vmaxu2(words.z & 0x7fff7fff, words.w & 0x7fff7fff)));
    } else {
      largest = max(largest, max(max(words.x & 0x7fffffff, words.y & 0x7fffffff),
                                 max(words.z & 0x7fffffff, words.w & 0x7fffffff)));
    }
  }
  if constexpr (sizeof(T) == 2) {
    largest = __float_as_uint(tile::to_float(T{static_cast<uint16_t>(max(largest & 0xffff, largest >> 16))}));
  }
  if (largest < kInfinityBits) return largest;
  largest = 0;
#pragma unroll 1
  for (int i = 0; i < kVectors; ++i) {
    float values[kCount];
#pragma unroll
    for (int k = 0; k < kVectors; ++k) {  // registers have no run-time index
      if (k == i) vectors[k].unpack(values);
    }
#pragma unroll
    for (float value : values) {
      const uint32_t bits = __float_as_uint(value) & 0x7fffffff;
      if (bits < kInfinityBits) largest = max(largest, bits);
    }
  }
  return largest;
}

// kVectors: 16-byte vectors of the row that a thread has.
template <class T, class Code, int kVectors>
__global__ void __launch_bounds__(kRowThreads) cast_rows_at_once(const __grid_constant__ RowArguments arguments) {
  constexpr int kCount = tile::Vector<T>::kCount;
  __shared__ uint32_t warps[kRowThreads / 32];
  const int64_t row = blockIdx.x;
  const int32_t first = static_cast<int32_t>(threadIdx.x) * kCount;
  const T* x = static_cast<const T*>(arguments.x) + row * arguments.row_stride;
  tile::Vector<T> vectors[kVectors];
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    const int32_t column = first + i * kRowThreads * kCount;
    vectors[i] = tile::load_once_if<T>(column < arguments.columns, x + column);
  }
  uint32_t magnitude = __reduce_max_sync(0xffffffffu, finite_magnitude(vectors));
  if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = magnitude;
  __syncthreads();
#pragma unroll
  for (uint32_t warp : warps) magnitude = max(magnitude, warp);
  const float scale = scale_of(__uint_as_float(magnitude), arguments.rule), inverse = 1.0f / scale;
  if (threadIdx.x == 0) arguments.scales.data[row * arguments.scales.row_stride] = scale;
  uint8_t* codes = arguments.codes + row * arguments.codes_stride;
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    const int32_t column = first + i * kRowThreads * kCount;
    if (column >= arguments.columns) continue;
    float values[kCount];
    vectors[i].unpack(values);
#pragma unroll
    for (float& value : values) value *= inverse;
    if constexpr (kCount == 8) {
      *reinterpret_cast<uint2*>(codes + column) =
          make_uint2(tile::Word<Code>::pack(values), tile::Word<Code>::pack(values + 4));
    } else {
      *reinterpret_cast<uint32_t*>(codes + column) = tile::Word<Code>::pack(values);
    }
  }
}

}  // namespace kernel_pytorch::quantize
