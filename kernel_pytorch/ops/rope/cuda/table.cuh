// Positions, and the cos and sin of a token's pairs, from a table or computed. The angle is position * frequency to
// twice float's precision before whole turns are taken off, so late positions lose nothing.
#pragma once

#include "kernel_pytorch/cuda/tile/vector.cuh"
#include "kernel_pytorch/ops/rope/cuda/arguments_cuda.h"

namespace kernel_pytorch::rope {

__device__ __forceinline__ void turn(float& first, float& second, float cosine, float sine) {
  const float a = first, b = second;
  first = a * cosine - b * sine;
  second = b * cosine + a * sine;
}

// The pairs inside one vector, whose cos and sin begin at `from`.
template <int kCount>
__device__ __forceinline__ void rotate_interleaved_pairs(float (&values)[kCount], const float (&cosines)[kCount],
                                                         const float (&sines)[kCount], int from) {
#pragma unroll
  for (int j = 0; j < kCount / 2; ++j) turn(values[2 * j], values[2 * j + 1], cosines[from + j], sines[from + j]);
}

__device__ __forceinline__ int64_t position_of(const TableArguments& table, int64_t batch, int64_t place) {
  if (table.positions == nullptr) return place;
  const int64_t offset = batch * table.position_strides[0] + place * table.position_strides[1];
  return table.positions_are_64 ? static_cast<const int64_t*>(table.positions)[offset]
                                : static_cast<const int32_t*>(table.positions)[offset];
}

__device__ __forceinline__ bool has_row(const TableArguments& table, int64_t position) {
  return position >= 0 && position < table.rows;
}

__device__ __forceinline__ void compute_cos_sin(const TableArguments& table, float position, int pair, float& cosine,
                                                float& sine) {
  const float frequency = table.inverse_frequencies[pair];
  const float angle = position * frequency;
  const float angle_rest = fmaf(position, frequency, -angle);
  const float turns = rintf(angle * 0.159154943f);
  // 2 pi in three parts.
  float rest = fmaf(turns, -6.28125f, angle);
  rest = fmaf(turns, -0.00193530717f, rest);
  rest = fmaf(turns, -1.02531317e-11f, rest) + angle_rest;
  sincospif(rest * 0.318309886f, &sine, &cosine);
  cosine *= table.scale;
  sine *= table.scale;
}

// Values of one vector's pairs: of the heads' type or float, in steps of the table.
template <class T, int kCount>
__device__ __forceinline__ void load_table(const void* table, const int64_t* strides, int64_t row_offset, int pair,
                                           bool is_float, float (&values)[kCount]) {
  const int64_t start = row_offset + pair * strides[2];
  const bool is_vector = kCount == tile::Vector<T>::kCount && strides[2] == 1;
  if (is_float) {
    const float* from = static_cast<const float*>(table) + start;
    if (is_vector && reinterpret_cast<uint64_t>(from) % tile::kVectorBytes == 0) {
#pragma unroll
      for (int part = 0; part < kCount / 4; ++part) {
        float four[4];
        tile::load_shared_by_all<float>(from + part * 4).unpack(four);
#pragma unroll
        for (int i = 0; i < 4; ++i) values[part * 4 + i] = four[i];
      }
      return;
    }
#pragma unroll
    for (int i = 0; i < kCount; ++i) values[i] = from[i * strides[2]];
    return;
  }
  const T* from = static_cast<const T*>(table) + start;
  if constexpr (kCount == tile::Vector<T>::kCount) {
    if (is_vector && reinterpret_cast<uint64_t>(from) % tile::kVectorBytes == 0) {
      tile::load_shared_by_all<T>(from).unpack(values);
      return;
    }
  }
#pragma unroll
  for (int i = 0; i < kCount; ++i) values[i] = tile::to_float<T>(from[i * strides[2]]);
}

// The cos and sin of the pairs from `first_pair` on, the sine with the sign of the direction. NaN where a table has no
// row for the position.
template <class T, int kCount>
__device__ __forceinline__ void fill_cos_sin(const TableArguments& table, int64_t batch, int64_t place, int first_pair,
                                             float (&cosines)[kCount], float (&sines)[kCount]) {
  const int64_t position = position_of(table, batch, place);
  if (table.cos == nullptr) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      compute_cos_sin(table, static_cast<float>(position), first_pair + i, cosines[i], sines[i]);
    }
  } else if (!has_row(table, position)) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) cosines[i] = sines[i] = __int_as_float(0x7fc00000);
  } else {
    load_table<T>(table.cos, table.cos_strides, batch * table.cos_strides[0] + position * table.cos_strides[1],
                  first_pair, table.is_float, cosines);
    load_table<T>(table.sin, table.sin_strides, batch * table.sin_strides[0] + position * table.sin_strides[1],
                  first_pair, table.is_float, sines);
  }
  if (!table.inverse) return;
#pragma unroll
  for (int i = 0; i < kCount; ++i) sines[i] = -sines[i];
}

}  // namespace kernel_pytorch::rope
