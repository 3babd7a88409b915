// The triangular system of a chunk: M = (I + A)^-1 diag(beta), fp32. Four 16 x 16 blocks on the diagonal are solved a
// row after another, a column of the inverse per lane; blocks below them are products, of which tf32's unit multiplies
// both halves of each number, so that the digits are fp32's. sm_80.
#pragma once

#include "kernel_pytorch/cuda/ptx/matrix_move.cuh"
#include "kernel_pytorch/cuda/ptx/memory.cuh"
#include "kernel_pytorch/cuda/tile/fragment.cuh"
#include "kernel_pytorch/cuda/tile/mma.cuh"
#include "kernel_pytorch/cuda/tile/vector.cuh"
#include "kernel_pytorch/ops/linear_attention/delta/sm90/places.cuh"

namespace kernel_pytorch::linear_attention::delta {

using System = float[kChunkTokens][kSystemPitch];

// sum += a b of 16 x 16 blocks that begin at these elements.
__device__ __forceinline__ void add_block_product(float (&sum)[2][4], const float* a, const float* b) {
  const int lane = threadIdx.x % 32, row = lane / 4, k = lane % 4;
  const auto split = [](float x, uint32_t& high, uint32_t& low) {
    high = __float_as_uint(x) & 0xffffe000u;
    low = __float_as_uint(x - __uint_as_float(high));
  };
#pragma unroll
  for (int first = 0; first < 16; first += 8) {
    uint32_t high_a[4], low_a[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      split(a[(row + i % 2 * 8) * kSystemPitch + first + k + i / 2 * 4], high_a[i], low_a[i]);
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      uint32_t high_b[2], low_b[2];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        split(b[(first + k + 4 * i) * kSystemPitch + 8 * half + row], high_b[i], low_b[i]);
      }
      ptx::mma_m16n8k8_f32_tf32(sum[half], low_a, high_b[0], high_b[1]);
      ptx::mma_m16n8k8_f32_tf32(sum[half], high_a, low_b[0], low_b[1]);
      ptx::mma_m16n8k8_f32_tf32(sum[half], high_a, high_b[0], high_b[1]);
    }
  }
}
__device__ __forceinline__ void store_block(const float (&sum)[2][4], float sign, float* to) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      to[tile::fragment_row(lane, i) * kSystemPitch + 8 * half + tile::fragment_column(lane, i)] = sign * sum[half][i];
    }
  }
}

// By four warps; `a` is read below its diagonal, of `inverse` the blocks on and below it are written. The caller
// synchronises before and after.
__device__ __forceinline__ void invert(const System& a, System& inverse) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, column = lane % 16;
  float solved[16];
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    float sum = i == column ? 1.0f : 0.0f;
#pragma unroll
    for (int j = 0; j < i; ++j) sum -= a[16 * warp + i][16 * warp + j] * solved[j];
    solved[i] = sum;
    if (lane < 16) inverse[16 * warp + i][16 * warp + column] = sum;
  }
  __syncthreads();
  for (int i = warp + 1; i < 4; ++i) {
    float sum[2][4] = {};
    for (int k = warp; k < i; ++k) add_block_product(sum, &a[16 * i][16 * k], &inverse[16 * k][16 * warp]);
    store_block(sum, -1.0f, &inverse[16 * i][16 * warp]);
    __syncwarp();
    float block[2][4] = {};
    add_block_product(block, &inverse[16 * i][16 * i], &inverse[16 * i][16 * warp]);
    __syncwarp();
    store_block(block, 1.0f, &inverse[16 * i][16 * warp]);
    __syncwarp();
  }
}

// Four words of a fragment for this thread's place in it: a matrix of a chunk and head, 16 columns from 16 * step on.
__device__ __forceinline__ void store_fragment(void* matrices, int step, const uint32_t (&words)[4]) {
  const int64_t place = (static_cast<int64_t>(blockIdx.x) * 4 + step) * kPrepareThreads + threadIdx.x;
  ptx::st_global_v4(static_cast<ptx::Word4*>(matrices) + place, {words[0], words[1], words[2], words[3]});
}

// M, rounded.
template <class T>
__device__ __forceinline__ void store_matrix(const System& inverse, const float (&beta)[kChunkTokens], void* matrices) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll
  for (int step = 0; step < 4; ++step) {
    uint32_t words[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int row = 16 * warp + lane / 4 + i % 2 * 8, column = 16 * step + i / 2 * 8 + lane % 4 * 2;
      float pair[2];
#pragma unroll
      for (int k = 0; k < 2; ++k) pair[k] = column + k <= row ? inverse[row][column + k] * beta[column + k] : 0.0f;
      words[i] = tile::Word<T>::pack(pair);
    }
    store_fragment(matrices, step, words);
  }
}

// Four 8 x 8 matrices of the 16 rows from `row` on and 16 columns from `column` on of a tile with rows of so many
// bytes: as a first operand, or (kIsSecond) as a second one whose columns are the tile's rows.
template <bool kIsSecond, int kPitch>
__device__ __forceinline__ void load_fragment(uint32_t (&words)[4], uint32_t tile, int row, int column) {
  const int lane = threadIdx.x % 32, matrix = lane / 8;
  const int high_row = kIsSecond ? matrix / 2 : matrix % 2, high_column = kIsSecond ? matrix % 2 : matrix / 2;
  ptx::ldmatrix_x4(words, tile + (row + 8 * high_row + lane % 8) * kPitch + (column + 8 * high_column) * 2);
}

}  // namespace kernel_pytorch::linear_attention::delta
