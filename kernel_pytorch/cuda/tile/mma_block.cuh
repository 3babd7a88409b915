// The middle of a product by mma.m16n8k16: eight warps of 64 x 32 make a block's 128 x 128 sums of operands that lie in
// shared memory. All warps do the same. sm_80.
#pragma once

#include "kernel_pytorch/cuda/ptx/matrix_move.cuh"
#include "kernel_pytorch/cuda/tile/mma.cuh"

namespace kernel_pytorch::tile {

// A stage of an operand: 128 lines of k where k is dense, else (kIsAcross) k lines of 128. Rows are so many bytes
// apart.
template <bool kIsAcross, int kPitchBytes>
struct StageLayout {
  static constexpr bool kAcross = kIsAcross;
  static constexpr int kPitch = kPitchBytes;
};

template <class T, class LayoutA, class LayoutB>
class MmaBlock {
 public:
  // Adds the products of 16 of k, from `k` on.
  __device__ __forceinline__ void add(uint32_t stage_a, uint32_t stage_b, int k) {
    const int warp = static_cast<int>(threadIdx.x / 32), warp_row = warp / 4 * 64, warp_column = warp % 4 * 32;
    uint32_t of_a[4][4], of_b[2][4];
#pragma unroll
    for (int i = 0; i < 4; ++i) fragment<LayoutA, false>(of_a[i], stage_a, warp_row + 16 * i, k);
#pragma unroll
    for (int j = 0; j < 2; ++j) fragment<LayoutB, true>(of_b[j], stage_b, warp_column + 16 * j, k);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        multiply_fragments<T>(sums_[i][j], of_a[i], of_b[j / 2][j % 2 * 2], of_b[j / 2][j % 2 * 2 + 1]);
      }
    }
  }

  // Adds the sums of `part`, each times the scales of its row and of its column in the block, and clears them.
  template <class OfRow, class OfColumn>
  __device__ __forceinline__ void add_scaled(MmaBlock& part, const OfRow& of_row, const OfColumn& of_column) {
    const int warp = static_cast<int>(threadIdx.x / 32), lane = static_cast<int>(threadIdx.x % 32);
    float of_columns[4][2];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
#pragma unroll
      for (int side = 0; side < 2; ++side) {
        of_columns[j][side] = of_column(warp % 4 * 32 + 8 * j + lane % 4 * 2 + side);
      }
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float scale = of_row(warp / 4 * 64 + 16 * i + lane / 4 + 8 * half);
#pragma unroll
        for (int j = 0; j < 4; ++j) {
#pragma unroll
          for (int side = 0; side < 2; ++side) {
            float& sum = part.sums_[i][j][2 * half + side];
            sums_[i][j][2 * half + side] += sum * (scale * of_columns[j][side]);
            sum = 0.0f;
          }
        }
      }
    }
  }

  // Rows [64 * half, 64 * half + 64) of the sums.
  __device__ __forceinline__ void store(float (&finished)[64][128], int half) const {
    const int warp = static_cast<int>(threadIdx.x / 32), lane = static_cast<int>(threadIdx.x % 32);
    if (warp / 4 != half) return;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
#pragma unroll
        for (int r = 0; r < 4; ++r) {
          finished[16 * i + lane / 4 + r / 2 * 8][warp % 4 * 32 + 8 * j + lane % 4 * 2 + r % 2] = sums_[i][j][r];
        }
      }
    }
  }

 private:
  // Four 8 x 8 matrices of a 16 (rows) by 16 (k) block: rows first, then k, or (kColumnsOfB) the other way round.
  template <class Layout, bool kColumnsOfB>
  static __device__ __forceinline__ void fragment(uint32_t (&words)[4], uint32_t stage, int row, int k) {
    const int lane = static_cast<int>(threadIdx.x % 32), matrix = lane / 8;
    const int high_row = kColumnsOfB ? matrix / 2 : matrix % 2, high_k = kColumnsOfB ? matrix % 2 : matrix / 2;
    if constexpr (Layout::kAcross) {
      ptx::ldmatrix_x4_trans(words, stage + (k + 8 * high_k + lane % 8) * Layout::kPitch + (row + 8 * high_row) * 2);
    } else {
      ptx::ldmatrix_x4(words, stage + (row + 8 * high_row + lane % 8) * Layout::kPitch + (k + 8 * high_k) * 2);
    }
  }

  float sums_[4][4][4] = {};
};

}  // namespace kernel_pytorch::tile
