// The product of at most 16 rows with a weight whose codes have 2, 3, 5 or 6 bits: a warp has four rows of the weight,
// a lane 32 of their columns at a time, which are as many words as a code has bits, and up to eight rows of x. Products
// are fp32; a code becomes code - zero exactly by the bits of 2^23, and the group's scale is one product of sums.
// sm_80.
#pragma once

#include "kernel_pytorch/cuda/tile/vector.cuh"
#include "kernel_pytorch/ops/engines/gemm/tile/finish.cuh"
#include "kernel_pytorch/ops/quantized_matmul/cuda/arguments_cuda.h"

namespace kernel_pytorch::quantized_matmul {

using group_format::Format;

template <class T, Format kFormat, int kRows>
__global__ void __launch_bounds__(kBitsThreads) bits_product(const __grid_constant__ Arguments arguments) {
  constexpr int kBits = group_format::code_bits(kFormat), kWeights = kBitsColumns, kChunk = 32;
  constexpr int kCount = tile::Vector<T>::kCount;
  const WeightArguments& weight = arguments.weight;
  const product::TileArguments& tile = arguments.tile;
  const int32_t lane = static_cast<int32_t>(threadIdx.x % 32), warp = static_cast<int32_t>(threadIdx.x / 32);
  const int32_t first_column = (static_cast<int32_t>(blockIdx.x) * (kBitsThreads / 32) + warp) * kWeights;
  const int32_t first_row = static_cast<int32_t>(blockIdx.y) * kRows;
  if (first_column >= tile.n) return;  // all of a warp
  const T* x = static_cast<const T*>(tile.a.data);
  float sums[kWeights][kRows] = {};
#pragma unroll 1
  for (int32_t chunk = lane; chunk < tile.k / kChunk; chunk += 32) {
    uint32_t words[kWeights][kBits];
    float scales[kWeights], offsets[kWeights];
#pragma unroll
    for (int i = 0; i < kWeights; ++i) {
      const int64_t row = min(first_column + i, tile.n - 1);
      const auto* source = reinterpret_cast<const uint32_t*>(weight.codes + row * weight.code_stride) + chunk * kBits;
#pragma unroll
      for (int j = 0; j < kBits; ++j) words[i][j] = source[j];
      const int64_t place = row * weight.groups + (chunk * kChunk >> weight.group_shift);
      scales[i] = tile::to_float<T>(static_cast<const T*>(weight.scales)[place]);
      const int32_t zero = weight.zeros != nullptr ? weight.zeros[place] : group_format::middle_code(kFormat);
      offsets[i] = __uint_as_float(0x4b000000u + static_cast<uint32_t>(zero));
    }
    float parts[kWeights][kRows] = {};
#pragma unroll
    for (int first = 0; first < kChunk; first += kCount) {
      float values[kRows][kCount];
#pragma unroll
      for (int j = 0; j < kRows; ++j) {
        const int32_t row = first_row + j;
        tile::load_shared_by_all_if<T>(row < tile.m, x + min(row, tile.m - 1) * tile.a.outer + chunk * kChunk + first)
            .unpack(values[j]);
      }
#pragma unroll
      for (int i = 0; i < kWeights; ++i) {
#pragma unroll
        for (int c = 0; c < kCount; ++c) {
          const int bit = (first + c) * kBits;
          uint32_t code = words[i][bit / 32] >> (bit % 32);
          if (bit % 32 + kBits > 32) code |= words[i][bit / 32 + 1] << (32 - bit % 32);
          code = (code & group_format::last_code(kFormat)) | 0x4b000000u;
          const float value = __uint_as_float(code) - offsets[i];
#pragma unroll
          for (int j = 0; j < kRows; ++j) parts[i][j] += value * values[j][c];
        }
      }
    }
#pragma unroll
    for (int i = 0; i < kWeights; ++i) {
#pragma unroll
      for (int j = 0; j < kRows; ++j) sums[i][j] += parts[i][j] * scales[i];
    }
  }
#pragma unroll
  for (int i = 0; i < kWeights; ++i) {
#pragma unroll
    for (int j = 0; j < kRows; ++j) {
#pragma unroll
      for (int distance = 16; distance > 0; distance /= 2) {
        sums[i][j] += __shfl_xor_sync(0xffffffff, sums[i][j], distance);
      }
    }
  }
  // Each lane ends two neighbouring columns of one row: one epilogue in the code.
  int32_t row = 0, column = 0;
  float values[2] = {};
#pragma unroll
  for (int i = 0; i < kWeights; i += 2) {
#pragma unroll
    for (int j = 0; j < kRows; ++j) {
      if (lane == i / 2 * kRows + j) {
        row = j;
        column = i;
        values[0] = sums[i][j];
        values[1] = sums[i + 1][j];
      }
    }
  }
  if (lane < kWeights / 2 * kRows) {
    product::TileFinish(tile).finish(first_row + row, first_column + column, values[0], values[1]);
  }
}

}  // namespace kernel_pytorch::quantized_matmul
