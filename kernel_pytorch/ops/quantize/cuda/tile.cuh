// What a thread of the quantising kernels has of a tile of 128 x 128: 4 rows of 8 columns, in registers or not at all.
#pragma once

#include "kernel_pytorch/cuda/ptx/control.cuh"
#include "kernel_pytorch/cuda/tile/vector.cuh"
#include "kernel_pytorch/ops/quantize/cuda/arguments_cuda.h"

namespace kernel_pytorch::quantize {

inline constexpr int kWarps = kThreads / 32;
inline constexpr int kRows = 4, kColumns = 8;  // of a thread
inline constexpr int kWarpsAcross = 2;         // a warp has 4 x 8 threads: 16 rows and 64 columns
inline constexpr int kWarpsDown = kWarps / kWarpsAcross;
inline constexpr int kPiece = 16;  // bytes

// What a thread has of the tile. With vectors, rows of 8 stay packed in registers: conversions are cheap, registers are
// not. Else nothing: every visit reads memory again, one element at a time, and loops over rows stay loops.
template <class T, bool kVectors>
struct ThreadTile {
  static constexpr int kCount = tile::Vector<T>::kCount, kPerRow = kColumns / kCount;
  static constexpr int kUnrolled = kRows;  // rows
  tile::Vector<T> rows[kRows][kPerRow];

  __device__ __forceinline__ ThreadTile() {}
  __device__ __forceinline__ ThreadTile(const Input& source, int32_t row, int32_t column) {
    const T* x = static_cast<const T*>(source.x);
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
#pragma unroll
      for (int k = 0; k < kPerRow; ++k) {
        const int32_t first = column + k * kCount;
        const bool is_inside = row + i < source.rows && first < source.columns;
        rows[i][k] = tile::load_once_if<T>(is_inside, x + (row + i) * source.row_stride + first);
      }
    }
  }
  // Between two visits: unpacked values are not kept for the second.
  __device__ __forceinline__ void pack_again() {
#pragma unroll
    for (auto& row : rows) {
#pragma unroll
      for (auto& vector : row) {
        ptx::forget_origin(vector.words.x);
        ptx::forget_origin(vector.words.y);
        ptx::forget_origin(vector.words.z);
        ptx::forget_origin(vector.words.w);
      }
    }
  }
  __device__ __forceinline__ void unpack(int i, float (&values)[kColumns]) const {
#pragma unroll
    for (int k = 0; k < kPerRow; ++k) {
      float part[kCount];
      rows[i][k].unpack(part);
#pragma unroll
      for (int j = 0; j < kCount; ++j) values[k * kCount + j] = part[j];
    }
  }
};
template <class T>
struct ThreadTile<T, false> {
  static constexpr int kUnrolled = 1;
  const T* x;
  int64_t row_stride, column_stride;
  int32_t rows, columns;  // that are left, of the tensor

  __device__ __forceinline__ ThreadTile(const Input& source, int32_t row, int32_t column)
      : x(static_cast<const T*>(source.x) + row * source.row_stride + column * source.column_stride),
        row_stride(source.row_stride),
        column_stride(source.column_stride),
        rows(source.rows - row),
        columns(source.columns - column) {}
  __device__ __forceinline__ void pack_again() {}
  __device__ __forceinline__ void unpack(int i, float (&values)[kColumns]) const {
#pragma unroll
    for (int j = 0; j < kColumns; ++j) {
      values[j] = i < rows && j < columns ? tile::to_float<T>(x[i * row_stride + j * column_stride]) : 0.0f;
    }
  }
};

// Where a thread's part begins in the tile.
struct Place {
  int row, column;
  __device__ __forceinline__ Place() {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    row = warp / kWarpsAcross * 16 + lane / 8 * kRows;
    column = warp % kWarpsAcross * 64 + lane % 8 * kColumns;
  }
};

}  // namespace kernel_pytorch::quantize
