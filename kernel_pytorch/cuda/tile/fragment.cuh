// Where the elements of matrix fragments belong: accumulators of mma.m16n8 and wgmma, and 16-byte units of a swizzled
// tile for ldmatrix and stmatrix.
#pragma once

#include "kernel_pytorch/base/fixed_width.h"
#include "kernel_pytorch/cuda/tile/element.cuh"

namespace kernel_pytorch::tile {

// Row and column of accumulator `index` of a lane, inside the 16 rows of its warp.
__device__ __forceinline__ int fragment_row(int lane, int index) {
  return lane / 4 + index % 4 / 2 * 8;
}
__device__ __forceinline__ int fragment_column(int lane, int index) {
  return index / 4 * 8 + lane % 4 * 2 + index % 2;
}

// Accumulators as the A operand of the next product: the same elements, two a word.
template <class T, int kCount>
__device__ __forceinline__ void pack_fragment(uint32_t (&packed)[kCount / 2], const float (&values)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount / 2; ++i) packed[i] = Word<T>::pack(values + 2 * i);
}

// Bytes from the start of a chunk (rows of 128 bytes, 128-byte swizzle) to 16-byte unit `unit` of a row.
__device__ __forceinline__ uint32_t swizzled_offset(int row, int unit) {
  return row * 128 + ((unit ^ (row & 7)) << 4);
}

// The 16 x 16 block of a swizzled tile that ldmatrix_x4 or stmatrix_x4 moves as one A operand (or two groups of eight
// accumulator columns): the address this lane names. `first_row` is a multiple of 16, `block` counts 16 columns.
template <int kChunkRows>
__device__ __forceinline__ uint32_t fragment_address(uint32_t tile, int first_row, int block, int lane) {
  return tile + block / 4 * (kChunkRows * 128) + swizzled_offset(first_row + lane % 16, block % 4 * 2 + lane / 16);
}

}  // namespace kernel_pytorch::tile
