// Tiles of 16-bit elements in shared memory as wgmma sees them: chunks of 64 elements (128 bytes) a row, swizzled by
// 128 bytes as the copy engine writes them, chunk after chunk. A chunk starts at a multiple of 1024 bytes. sm_90a.
//
// A descriptor is two words. The high one is the same for every such tile. The low one holds the address and, for tiles
// read along their rows, the distance of chunks; adding to it walks the tile, which stays in uniform registers when the
// base is the same in all lanes.
#pragma once

#include "kernel_pytorch/base/fixed_width.h"
#include "kernel_pytorch/cuda/ptx/wgmma.cuh"

namespace kernel_pytorch::tile {

inline constexpr int kChunkColumns = 64;
inline constexpr int kChunkRowBytes = 128;
inline constexpr int kProductDepth = 16;  // of one wgmma

// [kRows][columns] where the product sums along columns: Q and K of Q K^T.
template <int kRows>
struct AlongColumns {
  static constexpr int kTransposed = 0;
  static __device__ __forceinline__ uint32_t base(uint32_t address) { return address >> 4; }
  static constexpr __device__ __forceinline__ uint32_t step(int k) {
    return k / 4 * (kRows * kChunkRowBytes / 16) + k % 4 * (kProductDepth * 2 / 16);
  }
};

// [kRows][columns] where the product sums along rows: V of P V.
template <int kRows>
struct AlongRows {
  static constexpr int kTransposed = 1;
  static __device__ __forceinline__ uint32_t base(uint32_t address) {
    return address >> 4 | (kRows * kChunkRowBytes / 16) << 16;
  }
  static constexpr __device__ __forceinline__ uint32_t step(int k) { return k * (kProductDepth * kChunkRowBytes / 16); }
};

// d = a b (+ d), kSteps * 16 deep, a and b bases of tiles in shared memory. Asynchronous: fence, commit and wait are
// the caller's.
template <class Mma, class A, class B, int kSteps, int kFirst = 0>
__device__ __forceinline__ void multiply(float (&d)[Mma::kCount], uint32_t a, uint32_t b, bool accumulate) {
  Mma::template ss<A::kTransposed, B::kTransposed, A::step(kFirst), B::step(kFirst)>(d, a, b, accumulate);
  if constexpr (kFirst + 1 < kSteps) multiply<Mma, A, B, kSteps, kFirst + 1>(d, a, b, true);
}

// The same with a in registers: four words a step.
template <class Mma, class B, int kSteps, int kFirst = 0>
__device__ __forceinline__ void multiply(float (&d)[Mma::kCount], const uint32_t (&a)[4 * kSteps], uint32_t b,
                                         bool accumulate) {
  Mma::template rs<B::kTransposed, B::step(kFirst)>(d, a + 4 * kFirst, b, accumulate);
  if constexpr (kFirst + 1 < kSteps) multiply<Mma, B, kSteps, kFirst + 1>(d, a, b, true);
}

}  // namespace kernel_pytorch::tile
