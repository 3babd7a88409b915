// The product of 8-bit integers by mma.m16n8k32: four warps have 64 rows and 64 columns of the output, a quarter each,
// and 64 columns of both operands in shared memory at a time. At the end of a block of columns int32 sums become floats
// and meet their scale. kAligned: rows begin at multiples of 16 bytes and have a multiple of 16 columns. sm_80.
#pragma once

#include "kernel_pytorch/cuda/ptx/integer_mma.cuh"
#include "kernel_pytorch/cuda/tile/element.cuh"
#include "kernel_pytorch/cuda/tile/vector.cuh"
#include "kernel_pytorch/ops/engines/gemm/tile/finish.cuh"
#include "kernel_pytorch/ops/int8_matmul/cuda/arguments_cuda.h"

namespace kernel_pytorch::int8_matmul {

// A row to 8 bits: one block of threads for each, which reads it twice.
template <class T>
__global__ void __launch_bounds__(kThreads) round_rows(const __grid_constant__ RoundArguments arguments) {
  __shared__ uint32_t of_warps[kThreads / 32];
  const int64_t row = blockIdx.x;
  const T* x = static_cast<const T*>(arguments.x) + row * arguments.x_stride;
  uint32_t largest = 0;  // magnitudes have the order of their bits; infinity and NaN are the largest
  for (int32_t i = threadIdx.x; i < arguments.k; i += kThreads) {
    largest = max(largest, __float_as_uint(tile::to_float<T>(x[i])) & 0x7fffffffu);
  }
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) {
    largest = max(largest, __shfl_xor_sync(0xffffffff, largest, distance));
  }
  if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = largest;
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kThreads / 32; ++i) largest = max(largest, of_warps[i]);
  const float exact = __fdiv_rn(__uint_as_float(largest), 127.0f);
  const float scale = largest >= 0x7f800000u ? __uint_as_float(0x7fc00000u) : exact < 0x1p-100f ? 0.0f : exact;
  if (threadIdx.x == 0) arguments.scales[row] = scale;
  int8_t* codes = arguments.codes + row * arguments.code_stride;
  for (int32_t i = threadIdx.x; i < arguments.code_stride; i += kThreads) {
    const float value = i < arguments.k && scale > 0.0f ? rintf(__fdiv_rn(tile::to_float<T>(x[i]), scale)) : 0.0f;
    codes[i] = static_cast<int8_t>(static_cast<int32_t>(value));
  }
}

// 16 bytes of a row, zeros outside.
template <bool kAligned>
__device__ __forceinline__ ptx::Word4 load_bytes(const int8_t* row, bool is_inside, int32_t first, int32_t end) {
  if constexpr (kAligned) {
    return ptx::ld_global_v4_if(is_inside && first < end, row + first);
  } else {
    uint32_t words[4] = {};
    for (int i = 0; i < 16; ++i) {
      if (is_inside && first + i < end) {
        words[i / 4] |= static_cast<uint32_t>(static_cast<uint8_t>(row[first + i])) << (i % 4 * 8);
      }
    }
    return {words[0], words[1], words[2], words[3]};
  }
}

template <bool kAligned>
__global__ void __launch_bounds__(kThreads) product(const __grid_constant__ ProductArguments arguments) {
  __shared__ __align__(16) int8_t of_x[kRows][kPitch];
  __shared__ __align__(16) int8_t of_weight[kColumns][kPitch];
  __shared__ float of_output[kRows][kColumns + 4];
  const product::TileArguments& tile = arguments.tile;
  const int32_t lane = static_cast<int32_t>(threadIdx.x % 32), warp = static_cast<int32_t>(threadIdx.x / 32);
  const int32_t first_row = static_cast<int32_t>(blockIdx.y) * kRows;
  const int32_t first_column = static_cast<int32_t>(blockIdx.x) * kColumns;
  const int32_t warp_row = warp / 2 * 32, warp_column = warp % 2 * 32;
  int32_t sums[2][4][4] = {};
  float totals[2][4][4] = {};
  for (int32_t step = 0; step < tile.k; step += kDepth) {
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kRows * kDepth / 16 / kThreads; ++i) {
      const int32_t index = static_cast<int32_t>(threadIdx.x) + i * kThreads;
      const int32_t line = index / (kDepth / 16), first = index % (kDepth / 16) * 16;
      const int64_t row = first_row + line, column = first_column + line;
      const ptx::Word4 codes =
          load_bytes<kAligned>(arguments.x + row * arguments.x_stride, row < tile.m, step + first, tile.k);
      const ptx::Word4 weights =
          load_bytes<kAligned>(arguments.weight + column * tile.k, column < tile.n, step + first, tile.k);
      *reinterpret_cast<uint4*>(&of_x[line][first]) = make_uint4(codes.x, codes.y, codes.z, codes.w);
      *reinterpret_cast<uint4*>(&of_weight[line][first]) = make_uint4(weights.x, weights.y, weights.z, weights.w);
    }
    __syncthreads();
#pragma unroll
    for (int depth = 0; depth < kDepth; depth += 32) {
      const int32_t k = depth + lane % 4 * 4;
      uint32_t a[2][4];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
#pragma unroll
        for (int word = 0; word < 4; ++word) {
          const int32_t line = warp_row + 16 * i + lane / 4 + word % 2 * 8;
          a[i][word] = *reinterpret_cast<const uint32_t*>(&of_x[line][k + word / 2 * 16]);
        }
      }
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const int8_t* line = of_weight[warp_column + 8 * j + lane / 4];
        const uint32_t b0 = *reinterpret_cast<const uint32_t*>(line + k);
        const uint32_t b1 = *reinterpret_cast<const uint32_t*>(line + k + 16);
#pragma unroll
        for (int i = 0; i < 2; ++i) ptx::mma_m16n8k32_s32_s8(sums[i][j], a[i], b0, b1);
      }
      const int32_t end = step + depth + 32;
      if (end % arguments.block != 0 && end < tile.k) continue;
      const int32_t group = arguments.groups == 1 ? 0 : min((end - 1) / arguments.block, arguments.groups - 1);
#pragma unroll
      for (int j = 0; j < 4; ++j) {
#pragma unroll
        for (int side = 0; side < 2; ++side) {
          const int32_t column = first_column + warp_column + 8 * j + lane % 4 * 2 + side;
          const float scale =
              column < tile.n ? arguments.scale_weight[static_cast<int64_t>(column) * arguments.groups + group] : 0.0f;
#pragma unroll
          for (int i = 0; i < 2; ++i) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
              totals[i][j][2 * half + side] += static_cast<float>(sums[i][j][2 * half + side]) * scale;
              sums[i][j][2 * half + side] = 0;
            }
          }
        }
      }
    }
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int32_t line = warp_row + 16 * i + lane / 4 + 8 * half;
      const float scale = first_row + line < tile.m ? arguments.scale_x[first_row + line] : 0.0f;
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        float* to = of_output[line] + warp_column + 8 * j + lane % 4 * 2;
        to[0] = totals[i][j][2 * half] * scale;
        to[1] = totals[i][j][2 * half + 1] * scale;
      }
    }
  }
  __syncthreads();
  product::TileFinish finish(tile);
#pragma unroll 1
  for (int32_t pair = static_cast<int32_t>(threadIdx.x); pair < kRows * kColumns / 2; pair += kThreads) {
    const int32_t line = pair / (kColumns / 2), column = pair % (kColumns / 2) * 2;
    finish.finish(first_row + line, first_column + column, of_output[line][column], of_output[line][column + 1]);
  }
}

}  // namespace kernel_pytorch::int8_matmul
