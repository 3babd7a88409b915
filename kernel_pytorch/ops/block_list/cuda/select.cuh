// The selection on the GPU. A block of threads scores a few rows of one head, a thread a column at a time: its key
// parts pass through registers once for all rows, whose means wait in shared memory. Then each warp takes one row,
// finds the score of the last block that fits (bit by bit from the highest, counting what is not below: any length, no
// sort), and writes the list and the map.
#pragma once

#include "kernel_pytorch/cuda/tile/vector.cuh"
#include "kernel_pytorch/ops/block_list/cuda/kernel.cuh"

namespace kernel_pytorch::block_list {

__device__ __forceinline__ uint32_t sortable(float score) {
  if (score != score) return kNanScore;
  const uint32_t bits = __float_as_uint(score == 0 ? 0.0f : score);  // -0 is 0
  return (bits & 0x80000000u) != 0 ? ~bits : bits | 0x80000000u;
}

// Means of a block's rows as floats, zeros behind the last: shared [kSelectRows][size].
template <class T>
__device__ __forceinline__ void load_queries(const SelectArguments& arguments, const T* query, int first_row,
                                             float* means) {
#pragma unroll 1
  for (int i = threadIdx.x; i < kSelectRows * arguments.size; i += kThreads) {
    const int row = first_row + i / arguments.size;
    means[i] =
        row < arguments.grid.rows ? tile::to_float<T>(query[row * arguments.query_row + i % arguments.size]) : 0.0f;
  }
}

template <class T, bool kVectors>
__device__ __forceinline__ void score_column(const SelectArguments& arguments, int parts, const T* key,
                                             const float* means, int column, float (&scores)[kSelectRows]) {
  constexpr int kCount = kVectors ? tile::Vector<T>::kCount : 1;
  const int begin = column * arguments.key_parts;
  const int end = min(begin + arguments.key_parts, parts);
#pragma unroll 1
  for (int part = begin; part < end; ++part) {
    const T* from = key + part * arguments.key_row;
    float sums[kSelectRows] = {};
#pragma unroll 1
    for (int i = 0; i < arguments.size; i += kCount) {
      float values[kCount];
      if constexpr (kVectors) {
        tile::load_shared_by_all<T>(from + i).unpack(values);
      } else {
        values[0] = tile::to_float<T>(from[i]);
      }
#pragma unroll
      for (int row = 0; row < kSelectRows; ++row) {
#pragma unroll
        for (int j = 0; j < kCount; ++j) sums[row] += values[j] * means[row * arguments.size + i + j];
      }
    }
#pragma unroll
    for (int row = 0; row < kSelectRows; ++row) {
      // NaN stays only where nothing else is, and every part counts: fmaxf takes the number.
      scores[row] = part == begin ? sums[row] : fmaxf(scores[row], sums[row]);
    }
  }
}

// How many of a warp's scores are not below `least`.
__device__ __forceinline__ int count_from(const uint32_t* scores, int visible, uint32_t least) {
  int count = 0;
#pragma unroll 2
  for (int i = threadIdx.x % 32; i < visible; i += 32) count += scores[i] >= least;
  return __reduce_add_sync(0xffffffffu, count);
}

__device__ __forceinline__ void write_row(const SelectArguments& arguments, const uint32_t* scores, const Row& row,
                                          int64_t list) {
  const int columns = arguments.grid.columns;
  const int picked = min(row.picked, count_from(scores, row.visible, kNanScore));
  uint32_t least = 0xffffffffu;
  int ties = 0;  // of those at `least`, the first so many
  if (picked > 0) {
    least = 0;
#pragma unroll 1
    for (uint32_t bit = 0x80000000u; bit != 0; bit >>= 1) {
      if (count_from(scores, row.visible, least | bit) >= picked) least |= bit;
    }
    ties = picked - count_from(scores, row.visible, least + 1);
  }
  ListWriter writer(arguments.blocks + list * columns);
#pragma unroll 1
  for (int begin = 0; begin < columns; begin += 32) {
    const int column = begin + threadIdx.x % 32;
    const bool is_seen = column < row.visible;
    const uint32_t score = is_seen ? scores[column] : kNoScore;
    const bool is_tie = picked > 0 && score == least;
    const uint32_t votes = __ballot_sync(0xffffffffu, is_tie);
    const int place = __popc(votes & ((1u << (threadIdx.x % 32)) - 1));
    const bool is_kept =
        is_seen && (row.is_kept_always(column) || (picked > 0 && (score > least || (is_tie && place < ties))));
    ties -= min(ties, __popc(votes));
    writer.add(is_kept, column);
    if (arguments.map != nullptr && column < columns)
      arguments.map[list * columns + column] = is_kept ? kPartial : kEmpty;
  }
  writer.finish(arguments.counts + list, columns);
}

// The grids of entries with lengths of their own: a warp finds the share of one.
__global__ void __launch_bounds__(32) find_grids(const __grid_constant__ GridsArguments arguments) {
  const int entry = static_cast<int>(blockIdx.x);
  Grid grid = grid_of_lengths(arguments.grid, arguments.query_lengths[entry], arguments.key_lengths[entry],
                              arguments.is_aligned);
  choose_share(grid, arguments.sparsity, [&](const auto& of) {
    int64_t sum = 0;
    for (int32_t row = static_cast<int32_t>(threadIdx.x); row < grid.rows; row += 32) sum += of(row_of(grid, row));
    for (int distance = 16; distance > 0; distance /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, distance);
    return sum;
  });
  if (threadIdx.x == 0) arguments.grids[entry] = grid;
}

// Dynamic shared memory: scores [kSelectRows][columns], then means [kSelectRows][size].
template <class T, bool kVectors>
__global__ void __launch_bounds__(kThreads) select(const __grid_constant__ SelectArguments arguments) {
  extern __shared__ uint32_t shared[];
  const int columns = arguments.grid.columns;
  const int first_row = blockIdx.x % arguments.row_groups * kSelectRows;
  const int64_t batch_head = blockIdx.x / arguments.row_groups;
  const int64_t batch = batch_head / arguments.heads, head = batch_head % arguments.heads;
  const Grid grid = arguments.grids == nullptr ? arguments.grid : arguments.grids[batch];
  const int parts = static_cast<int>(parts_of(grid, arguments.key_parts));
  float* means = reinterpret_cast<float*>(shared + kSelectRows * columns);
  const T* key =
      static_cast<const T*>(arguments.key) + batch * arguments.key_batch + head / arguments.group * arguments.key_head;
  const float* given = arguments.scores + batch * arguments.scores_batch + head * arguments.scores_head;
  if (arguments.query != nullptr) {
    load_queries(arguments,
                 static_cast<const T*>(arguments.query) + batch * arguments.query_batch + head * arguments.query_head,
                 first_row, means);
    __syncthreads();
  }
  Row rows[kSelectRows];
#pragma unroll
  for (int i = 0; i < kSelectRows; ++i) rows[i] = first_row + i < grid.rows ? row_of(grid, first_row + i) : Row{};
#pragma unroll 1
  for (int column = threadIdx.x; column < columns; column += kThreads) {
    float scores[kSelectRows] = {};
    if (arguments.query != nullptr) score_column<T, kVectors>(arguments, parts, key, means, column, scores);
#pragma unroll
    for (int i = 0; i < kSelectRows; ++i) {
      if (first_row + i >= arguments.grid.rows) continue;
      if (arguments.query == nullptr) {
        scores[i] = given[(first_row + i) * arguments.scores_row + column * arguments.scores_column];
      }
      const bool is_low = arguments.has_threshold && !(scores[i] >= arguments.threshold);
      const bool is_out = column >= rows[i].visible || rows[i].is_kept_always(column) || is_low;
      shared[i * columns + column] = is_out ? kNoScore : sortable(scores[i]);
    }
  }
  __syncthreads();
  const int warp = threadIdx.x / 32;
  if (first_row + warp >= arguments.grid.rows) return;
  const Row row = first_row + warp < grid.rows ? row_of(grid, first_row + warp) : Row{};
  write_row(arguments, shared + warp * columns, row, batch_head * arguments.grid.rows + first_row + warp);
}

}  // namespace kernel_pytorch::block_list
