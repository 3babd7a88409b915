// The inner loop of steps 5 and 6: a tile of results stays in SIMD registers while k runs.
//
// Per step of k it loads kVecs registers of b and kRows numbers of a, and does kRows * kVecs multiply-adds with them:
// each loaded number is used many times, which is all that a fast GEMM needs.
#pragma once

#include "measure.h"

inline constexpr int kTileRows = 6;
inline constexpr int kTileVecs = course::kLanes == 16 ? 4 : 2;  // 6 x 4 of 32 registers, 6 x 2 of 16
inline constexpr int kTileColumns = kTileVecs * course::kLanes;

// sums[r][v] += a[r * a_row + k * a_step] * b[k * b_row + columns of v]
template <int kRows = kTileRows>
inline void register_tile(const float* a, long a_row, long a_step, const float* b, long b_row, long depth,
                          course::Vec (&sums)[kRows][kTileVecs]) {
  for (long k = 0; k < depth; ++k) {
    course::Vec of_b[kTileVecs];
#pragma GCC unroll 4
    for (int v = 0; v < kTileVecs; ++v) of_b[v] = course::load(b + k * b_row + v * course::kLanes);
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
      const float of_a = a[r * a_row + k * a_step];
#pragma GCC unroll 4
      for (int v = 0; v < kTileVecs; ++v) sums[r][v] += of_a * of_b[v];
    }
  }
}
