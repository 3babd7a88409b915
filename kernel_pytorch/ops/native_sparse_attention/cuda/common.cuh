// What the kernels share: where a token stands, elements, scores of a chunk of keys. FMA in float; sm_80.
#pragma once

#include "kernel_pytorch/cuda/tile/element.cuh"
#include "kernel_pytorch/cuda/tile/reduce.cuh"
#include "kernel_pytorch/ops/native_sparse_attention/cuda/arguments_cuda.h"
#include "kernel_pytorch/ops/support/indices_cuda.h"

namespace kernel_pytorch::native_sparse_attention {

__device__ __forceinline__ float nothing() {
  return __int_as_float(0xff800000);
}

// Where a query's token stands among the keys of its sequence, and where these begin.
struct Place {
  int32_t place;  // below 0: it sees nothing
  int32_t key_begin, compressed_begin;
};
__device__ __forceinline__ Place place_of(const Arguments& a, int32_t token) {
  if (a.offsets == nullptr) return {token + a.keys - a.queries, 0, 0};
  if (a.sequences <= 0 || token >= index_at(a.offsets, a.offsets_are_wide, a.sequences)) return {-1, 0, 0};
  int32_t low = 0, high = a.sequences - 1;  // the last sequence that begins at the token or before
  while (low < high) {
    const int32_t middle = high - (high - low) / 2;
    if (index_at(a.offsets, a.offsets_are_wide, middle) <= token) {
      low = middle;
    } else {
      high = middle - 1;
    }
  }
  const auto begin = static_cast<int32_t>(index_at(a.offsets, a.offsets_are_wide, low));
  return {token - begin, begin, (begin + a.compress_stride - 1) / a.compress_stride};
}
// Where the sequence of a token ends.
__device__ __forceinline__ int64_t end_of(const Arguments& a, int32_t token) {
  for (int32_t low = 0, high = a.sequences;;) {
    if (high - low <= 1) return index_at(a.offsets, a.offsets_are_wide, high);
    const int32_t middle = low + (high - low) / 2;
    if (index_at(a.offsets, a.offsets_are_wide, middle) <= token) {
      low = middle;
    } else {
      high = middle;
    }
  }
}
// Compressed rows that end before so many keys.
__device__ __forceinline__ int32_t compressed_before(const Arguments& a, int32_t keys) {
  return keys < a.compress_block ? 0 : (keys - a.compress_block) / a.compress_stride + 1;
}

template <class T>
__device__ __forceinline__ const T* row_at(const Rows& rows, int32_t batch, int32_t token, int32_t head) {
  return static_cast<const T*>(rows.data) + batch * rows.batch + token * rows.token + head * rows.head;
}
template <class T>
__device__ __forceinline__ T* result_at(const Rows& rows, int32_t batch, int32_t token, int32_t head) {
  return const_cast<T*>(row_at<T>(rows, batch, token, head));
}
template <class T>
__device__ __forceinline__ float gate_at(const Gate& gate, int32_t batch, int32_t token, int32_t head) {
  const int64_t offset = batch * gate.batch + token * gate.token + head * gate.head;
  if (gate.is_float) return static_cast<const float*>(gate.data)[offset];
  return tile::to_float(static_cast<const T*>(gate.data)[offset]);
}
template <class T>
__device__ __forceinline__ void store_gate(const Gate& gate, int32_t batch, int32_t token, int32_t head, float value) {
  if (gate.data == nullptr) return;
  const int64_t offset = batch * gate.batch + token * gate.token + head * gate.head;
  void* data = const_cast<void*>(gate.data);
  if (gate.is_float) {
    static_cast<float*>(data)[offset] = value;
  } else {
    static_cast<T*>(data)[offset] = tile::from_float<T>(value);
  }
}

// The rows that a branch of one token sees: a range, or the keys of a list's blocks. -1 is none.
struct Range {
  int32_t first, count;
  __device__ __forceinline__ int32_t row(int32_t i) const { return first + i; }
};
struct Listed {
  const int32_t* blocks;
  int32_t block_size, place, key_begin, count;
  __device__ __forceinline__ int32_t row(int32_t i) const {
    const int32_t block = blocks[i / block_size];
    if (block < 0 || block > place / block_size) return -1;
    const int32_t key = block * block_size + i % block_size;
    return key <= place ? key_begin + key : -1;
  }
};

// The heads that share a key head, of one token: which block of threads this is.
struct Group {
  int32_t batch, token, key_head;
  __device__ __forceinline__ explicit Group(const Arguments& a)
      : batch(static_cast<int32_t>(blockIdx.x / a.key_heads / a.queries)),
        token(static_cast<int32_t>(blockIdx.x / a.key_heads % a.queries)),
        key_head(static_cast<int32_t>(blockIdx.x % a.key_heads)) {}
};

// Rows of the group's heads as floats: shared [group][size].
template <class T>
__device__ __forceinline__ void load_heads(const Arguments& a, const Rows& rows, const Group& at, int32_t size,
                                           float factor, float* to) {
  for (int32_t i = static_cast<int32_t>(threadIdx.x); i < a.group * size; i += kThreads) {
    const T* row = row_at<T>(rows, at.batch, at.token, at.key_head * a.group + i / size);
    to[i] = tile::to_float(row[i % size]) * factor;
  }
}

// The products of this thread's row with every head: to[head * kChunk + thread]; -inf where it has none and `masks`.
template <class T>
__device__ __forceinline__ void dot_row(const Arguments& a, const float* heads, int32_t size, const T* row,
                                        float without, float* to) {
  constexpr int kTile = 4;
  for (int32_t head = 0; head < a.group; head += kTile) {
    float sums[kTile] = {};
    for (int32_t i = 0; row != nullptr && i < size; ++i) {
      const float element = tile::to_float(row[i]);
#pragma unroll
      for (int k = 0; k < kTile; ++k) {
        if (head + k < a.group) sums[k] += heads[(head + k) * size + i] * element;
      }
    }
#pragma unroll
    for (int k = 0; k < kTile; ++k) {
      if (head + k < a.group) to[(head + k) * kChunk + threadIdx.x] = row == nullptr ? without : sums[k];
    }
  }
}

// The first key of a mean; -1 where the row is no sequence's.
__device__ __forceinline__ int32_t first_of_mean(const Arguments& a, int32_t row) {
  if (a.offsets == nullptr) return row * a.compress_stride;
  // A row belongs to the last sequence whose rows begin at it or before: rows of two never overlap.
  int32_t low = 0, high = a.sequences - 1;
  while (low < high) {
    const int32_t middle = high - (high - low) / 2;
    const int64_t begin = index_at(a.offsets, a.offsets_are_wide, middle);
    if ((begin + a.compress_stride - 1) / a.compress_stride <= row) {
      low = middle;
    } else {
      high = middle - 1;
    }
  }
  if (a.sequences <= 0) return -1;
  const auto begin = static_cast<int32_t>(index_at(a.offsets, a.offsets_are_wide, low));
  const auto end = static_cast<int32_t>(index_at(a.offsets, a.offsets_are_wide, low + 1));
  const int32_t own = row - (begin + a.compress_stride - 1) / a.compress_stride;
  return own < 0 || own >= compressed_before(a, end - begin) ? -1 : begin + own * a.compress_stride;
}

// Means of blocks, a thread for each column of keys and of values.
template <class T>
__global__ void __launch_bounds__(kThreads, kBlocks) compress(const __grid_constant__ Arguments a) {
  const auto row = static_cast<int32_t>(blockIdx.x % a.compressed);
  const auto head = static_cast<int32_t>(blockIdx.x / a.compressed % a.key_heads);
  const auto batch = static_cast<int32_t>(blockIdx.x / a.compressed / a.key_heads);
  const int32_t first = first_of_mean(a, row);
  if (first < 0) return;
  const float share = 1.0f / static_cast<float>(a.compress_block);
  for (auto i = static_cast<int32_t>(threadIdx.x); i < a.size + a.value_size; i += kThreads) {
    const bool is_key = i < a.size;
    const Rows& from = is_key ? a.key : a.value;
    const int32_t column = is_key ? i : i - a.size;
    float sum = 0;
    for (int32_t k = 0; k < a.compress_block; ++k) {
      sum += tile::to_float(row_at<T>(from, batch, first + k, head)[column]);
    }
    result_at<float>(is_key ? a.means_of_key : a.means_of_value, batch, row, head)[column] = sum * share;
  }
}

}  // namespace kernel_pytorch::native_sparse_attention
