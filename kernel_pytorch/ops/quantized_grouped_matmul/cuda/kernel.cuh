// Grouped products with weights in few bits by mma.m16n8k16: a block finds its group as grouped_matmul's blocks do
// (engines/gemm/tile/grouped.cuh), puts 64 columns of 64 rows of x and of the group's weight, decoded, into shared
// memory at a time, and its eight warps have 32 rows and 16 columns of the output each. sm_80.
#pragma once

#include "kernel_pytorch/cuda/tile/mma.cuh"
#include "kernel_pytorch/cuda/tile/vector.cuh"
#include "kernel_pytorch/ops/engines/gemm/tile/grouped.cuh"
#include "kernel_pytorch/ops/quantized_grouped_matmul/cuda/arguments_cuda.h"

namespace kernel_pytorch::quantized_grouped_matmul {

using group_format::Format;

template <class T>
__device__ __forceinline__ float scale_at(const Arguments& arguments, int64_t place) {
  switch (arguments.scale_type) {
    case group_format::ScaleType::kE4M3:
      return group_format::e4m3_value(static_cast<const uint8_t*>(arguments.scales)[place]);
    case group_format::ScaleType::kE8M0:
      return group_format::e8m0_value(static_cast<const uint8_t*>(arguments.scales)[place]);
    default:
      return tile::to_float<T>(static_cast<const T*>(arguments.scales)[place]);
  }
}

// 16 columns of a row of the weight; zeros outside.
template <class T, Format kFormat>
__device__ __forceinline__ void decode_unit(const Arguments& arguments, int64_t line, bool is_inside, int32_t column,
                                            int32_t columns, T (&values)[kUnit]) {
  constexpr int kBits = group_format::code_bits(kFormat), kBytes = kUnit / 8 * kBits;
  uint32_t words[(kBytes + 3) / 4] = {};
  is_inside = is_inside && column < columns;
  const int32_t available = is_inside ? (min(columns - column, kUnit) * kBits + 7) / 8 : 0;
  const uint8_t* source = arguments.codes + line * arguments.code_stride + static_cast<int64_t>(column) / 8 * kBits;
#pragma unroll
  for (int i = 0; i < kBytes; ++i) {
    if (i < available) words[i / 4] |= static_cast<uint32_t>(source[i]) << (i % 4 * 8);
  }
  float scale = 0.0f;
  int32_t zero = group_format::middle_code(kFormat);
  if (is_inside) {
    const int64_t place = line * arguments.scales_of_row + column / arguments.group;
    scale = scale_at<T>(arguments, place);
    if (arguments.zeros != nullptr) zero = arguments.zeros[place];
  }
#pragma unroll
  for (int i = 0; i < kUnit; ++i) {
    uint32_t code = words[i * kBits / 32] >> (i * kBits % 32);
    if constexpr (group_format::is_bit_stream(kFormat)) {  // a code may lie in two words
      if (i * kBits % 32 + kBits > 32) code |= words[i * kBits / 32 + 1] << (32 - i * kBits % 32);
    }
    const float value = group_format::code_value<kFormat>(code & group_format::last_code(kFormat), zero) * scale;
    values[i] = tile::from_float<T>(column + i < columns && is_inside ? value : 0.0f);
  }
}

template <class T, Format kFormat, bool kAligned>
__global__ void __launch_bounds__(product::kTileThreads, 2) grouped_product(const __grid_constant__ Arguments given) {
  __shared__ __align__(16) T of_x[kEdge][kPitch];
  __shared__ __align__(16) T of_weight[kEdge][kPitch];
  __shared__ float of_output[kEdge][kEdge + 4];
  __shared__ product::GroupedTile own;
  if (!product::begin_tile<2>(given.grouped, own, kEdge)) return;
  const product::TileArguments& tile = own.product;
  const int32_t lane = static_cast<int32_t>(threadIdx.x % 32), warp = static_cast<int32_t>(threadIdx.x / 32);
  const int32_t first_row = own.tile * kEdge, first_column = static_cast<int32_t>(blockIdx.x) * kEdge;
  const int32_t warp_row = warp / 4 * 32, warp_column = warp % 4 * 16;
  // What this thread loads: 16 columns of a row of each operand.
  const int32_t line = static_cast<int32_t>(threadIdx.x) / (kDepth / kUnit);
  const int32_t unit = static_cast<int32_t>(threadIdx.x) % (kDepth / kUnit) * kUnit;
  const bool has_row = first_row + line < tile.m, has_column = first_column + line < tile.n;
  int64_t source = has_row ? first_row + line : 0;
  if (own.gather_a != nullptr && has_row) source = own.gather_a[source];
  const T* x = static_cast<const T*>(tile.a.data) + source * tile.a.outer;
  const int64_t weight_line = static_cast<int64_t>(own.group) * tile.n + first_column + line;
  float sums[2][2][4] = {};
  for (int32_t step = 0; step < tile.k; step += kDepth) {
    __syncthreads();
    if constexpr (kAligned) {
#pragma unroll
      for (int i = 0; i < kUnit; i += tile::Vector<T>::kCount) {
        const int32_t k = step + unit + i;
        const ptx::Word4 words = ptx::ld_global_v4_if(has_row && k < tile.k, x + k);
        *reinterpret_cast<uint4*>(&of_x[line][unit + i]) = make_uint4(words.x, words.y, words.z, words.w);
      }
    } else {
#pragma unroll
      for (int i = 0; i < kUnit; ++i) {
        const int32_t k = step + unit + i;
        of_x[line][unit + i] = has_row && k < tile.k ? x[k] : tile::from_float<T>(0.0f);
      }
    }
    T values[kUnit];
    decode_unit<T, kFormat>(given, weight_line, has_column, step + unit, tile.k, values);
#pragma unroll
    for (int i = 0; i < kUnit; ++i) of_weight[line][unit + i] = values[i];
    __syncthreads();
#pragma unroll
    for (int depth = 0; depth < kDepth; depth += 16) {
      const int32_t k = depth + lane % 4 * 2;
      uint32_t a[2][4];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
#pragma unroll
        for (int word = 0; word < 4; ++word) {
          const int32_t row = warp_row + 16 * i + lane / 4 + word % 2 * 8;
          a[i][word] = *reinterpret_cast<const uint32_t*>(&of_x[row][k + word / 2 * 8]);
        }
      }
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const T* row = of_weight[warp_column + 8 * j + lane / 4];
        const uint32_t b0 = *reinterpret_cast<const uint32_t*>(row + k);
        const uint32_t b1 = *reinterpret_cast<const uint32_t*>(row + k + 8);
#pragma unroll
        for (int i = 0; i < 2; ++i) tile::multiply_fragments<T>(sums[i][j], a[i], b0, b1);
      }
    }
  }
  const float factor = given.tensor_scale != nullptr ? *given.tensor_scale : 1.0f;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        float* to = of_output[warp_row + 16 * i + lane / 4 + 8 * half] + warp_column + 8 * j + lane % 4 * 2;
        to[0] = sums[i][j][2 * half] * factor;
        to[1] = sums[i][j][2 * half + 1] * factor;
      }
    }
  }
  __syncthreads();
  product::TileFinish finish(tile);
#pragma unroll 1
  for (int32_t pair = static_cast<int32_t>(threadIdx.x); pair < kEdge * kEdge / 2; pair += product::kTileThreads) {
    const int32_t row = pair / (kEdge / 2), column = pair % (kEdge / 2) * 2;
    finish.finish(first_row + row, first_column + column, of_output[row][column], of_output[row][column + 1]);
  }
}

}  // namespace kernel_pytorch::quantized_grouped_matmul
