// Sums of products of few rows where warps divide k: each warp's fragments go to shared memory, and threads add what
// the warps have of two neighbouring columns. A fragment's rows are columns of the output. sm_80.
#pragma once

#include "kernel_pytorch/cuda/tile/fragment.cuh"

namespace kernel_pytorch::product {

template <int kTiles, int kRowTiles, int kPitch>
__device__ __forceinline__ void store_thin_sums(const float (&sums)[kTiles][kRowTiles][4],
                                                float (&part)[kRowTiles * 8][kPitch], int lane, int first_column = 0) {
#pragma unroll
  for (int i = 0; i < kTiles; ++i) {
#pragma unroll
    for (int j = 0; j < kRowTiles; ++j) {
#pragma unroll
      for (int r = 0; r < 4; ++r) {
        part[8 * j + tile::fragment_column(lane, r)][first_column + 16 * i + tile::fragment_row(lane, r)] =
            sums[i][j][r];
      }
    }
  }
}

// Calls use(row, column, first, second) for every pair of columns, among kThreads threads.
template <int kThreads, int kColumns, int kParts, int kRows, int kPitch, class Use>
__device__ __forceinline__ void add_thin_sums(const float (&parts)[kParts][kRows][kPitch], const Use& use) {
#pragma unroll 1
  for (int32_t pair = static_cast<int32_t>(threadIdx.x); pair < kRows * kColumns / 2; pair += kThreads) {
    const int32_t row = pair / (kColumns / 2), column = pair % (kColumns / 2) * 2;
    float first = 0.0f, second = 0.0f;
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      first += parts[part][row][column];
      second += parts[part][row][column + 1];
    }
    use(row, column, first, second);
  }
}

}  // namespace kernel_pytorch::product
