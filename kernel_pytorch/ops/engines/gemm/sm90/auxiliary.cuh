// A warp's part of an auxiliary matrix of the epilogue (a residual, a saved preactivation), in the order of wgmma's
// accumulators: 16 bytes per lane if rows allow it, which the four lanes of a row then exchange.
#pragma once

#include "kernel_pytorch/cuda/ptx/memory.cuh"
#include "kernel_pytorch/cuda/tile/element.cuh"
#include "kernel_pytorch/cuda/tile/fragment.cuh"
#include "kernel_pytorch/cuda/tile/quad.cuh"
#include "kernel_pytorch/ops/engines/gemm/sm90/tile_cuda.h"

namespace kernel_pytorch::product {

template <bool kFloat, class Out>
struct AuxiliaryType {
  using Type = Out;
};
template <class Out>
struct AuxiliaryType<true, Out> {
  using Type = float;
};

template <class T>
__device__ __forceinline__ float element(const void* data, int64_t index) {
  return tile::to_float(static_cast<const T*>(data)[index]);
}

// The warp's first row, the box's first column, and where the matrix ends.
struct AuxiliaryPlace {
  int32_t lane, row, rows, column, columns, batch;
};

// A lane's vectors of eight 16-bit values from a box's two rows and 16 * kVectors columns; zeros beyond the matrix.
// Nothing waits for them here, unless rows may end within a vector (not kWhole).
template <class T, int kVectors, bool kWhole>
__device__ __forceinline__ void fetch_auxiliary(const Sm90Auxiliary& auxiliary, const AuxiliaryPlace& place,
                                                ptx::Word4* vectors) {
  const T* data = static_cast<const T*>(auxiliary.data) + place.batch * auxiliary.batch_stride;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int32_t row = place.row + place.lane / 4 + 8 * half;
    const T* of_row = data + row * auxiliary.row_stride;
    const bool is_inside = row < place.rows;
#pragma unroll
    for (int group = 0; group < kVectors / 2; ++group) {  // of 32 columns
      const int32_t column = place.column + 32 * group + 8 * (place.lane % 4);
      ptx::Word4 words = ptx::ld_global_v4_if(is_inside && column + 8 <= place.columns, of_row + column);
      if (!kWhole && is_inside && column < place.columns && column + 8 > place.columns) {
        uint32_t tail[4] = {0, 0, 0, 0};
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          if (column + i < place.columns) tail[i / 2] |= static_cast<uint32_t>(of_row[column + i].bits) << 16 * (i % 2);
        }
        words = {tail[0], tail[1], tail[2], tail[3]};
      }
      vectors[2 * group + half] = words;
    }
  }
}

// The eight values of a vector's row and the next three lanes' share of them: values[0], [1], [4], [5] and so on.
template <class T>
__device__ __forceinline__ void unpack_auxiliary(ptx::Word4 words, float* values) {
  words = tile::transpose_quad(words);
  tile::Word<T>::unpack(words.x, values);
  tile::Word<T>::unpack(words.y, values + 4);
  tile::Word<T>::unpack(words.z, values + 8);
  tile::Word<T>::unpack(words.w, values + 12);
}
template <class T, int kCount>
__device__ __forceinline__ void unpack_auxiliary(const ptx::Word4* vectors, float (&values)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount / 8; ++i) unpack_auxiliary<T>(vectors[i], values + i / 2 * 16 + i % 2 * 2);
}

// kCount: a thread's values of a box, two rows by kCount columns. Zero beyond the matrix.
template <class T, bool kWhole, int kCount>
__device__ __forceinline__ void load_auxiliary(const Sm90Auxiliary& auxiliary, const AuxiliaryPlace& place,
                                               float (&values)[kCount]) {
  if constexpr (sizeof(T) == 2 && kCount % 16 == 0) {
    ptx::Word4 vectors[kCount / 8];
    fetch_auxiliary<T, kCount / 8, kWhole>(auxiliary, place, vectors);
    unpack_auxiliary<T>(vectors, values);
  } else {
    const T* data = static_cast<const T*>(auxiliary.data) + place.batch * auxiliary.batch_stride;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int32_t row = place.row + place.lane / 4 + 8 * half;
      const T* of_row = data + row * auxiliary.row_stride;
      const bool is_inside = row < place.rows;
#pragma unroll
      for (int i = 0; i < kCount / 2; ++i) {
        const int index = i / 2 * 4 + 2 * half + i % 2;
        const int32_t column = place.column + tile::fragment_column(place.lane, index);
        values[index] = is_inside && column < place.columns ? tile::to_float(of_row[column]) : 0.0f;
      }
    }
  }
}

}  // namespace kernel_pytorch::product
