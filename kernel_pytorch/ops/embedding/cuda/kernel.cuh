// Embedding on the GPU. Forward: a copy of units. Backward, without a sort and without atomics on floats: a block owns
// a range of the table's rows and a strip of columns, looks through all indices for its rows (they come from L2), lists
// what it finds in the order of the positions, and sums. So every row is written once, in a fixed order.
#pragma once

#include "kernel_pytorch/cuda/tile/reduce.cuh"
#include "kernel_pytorch/cuda/tile/vector.cuh"
#include "kernel_pytorch/ops/embedding/cuda/arguments_cuda.h"
#include "kernel_pytorch/ops/support/any_rows.cuh"
#include "kernel_pytorch/ops/support/indices_cuda.h"

namespace kernel_pytorch::embedding {

template <class Unit>
__device__ __forceinline__ Unit repeat_word(uint32_t word) {
  return static_cast<Unit>(word);
}
template <>
__device__ __forceinline__ ptx::Word4 repeat_word<ptx::Word4>(uint32_t word) {
  return {word, word, word, word};
}

// Loads before stores, so that the rows of all units of a thread are on their way together.
template <class Unit>
__global__ void __launch_bounds__(kThreads) forward(const __grid_constant__ ForwardArguments arguments) {
  const int64_t first_unit = static_cast<int64_t>(blockIdx.x) * (kThreads * kForwardUnits);
  const int64_t first_row = first_unit / arguments.row_units;
  const uint32_t first_place = static_cast<uint32_t>(first_unit - first_row * arguments.row_units);
  const int64_t all_units = arguments.positions * arguments.row_units;
  const Unit* weight = static_cast<const Unit*>(arguments.weight);
  Unit* output = static_cast<Unit*>(arguments.output) + first_unit;
  Unit units[kForwardUnits];
#pragma unroll
  for (int i = 0; i < kForwardUnits; ++i) {
    const uint32_t offset = i * kThreads + threadIdx.x;
    if (first_unit + offset >= all_units) continue;
    const uint32_t place = first_place + offset;
    const uint32_t row = place / static_cast<uint32_t>(arguments.row_units);
    const uint32_t column = place - row * static_cast<uint32_t>(arguments.row_units);
    const int64_t index = index_at(arguments.indices, arguments.indices_are_wide, first_row + row);
    units[i] = repeat_word<Unit>(arguments.nan_word);
    if (index >= 0 && index < arguments.rows) {
      units[i] = weight[index * arguments.row_stride_units + column * arguments.unit_stride_units];
    }
  }
#pragma unroll
  for (int i = 0; i < kForwardUnits; ++i) {
    const uint32_t offset = i * kThreads + threadIdx.x;
    if (first_unit + offset < all_units) output[offset] = units[i];
  }
}

// Not inlined: it stands in three loops, and rows that need it are slow for other reasons.
__device__ __noinline__ int64_t offset_of_row(const AnyTensor& tensor, const AnyShape& shape, int64_t row) {
  return any_row_offset(tensor, shape, row);
}

// A lane's columns of one row of the strip, as floats: kBackwardVectors vectors, 32 lanes apart.
template <class T, bool kVectors>
struct Strip {
  static constexpr int kCount = kVectors ? tile::Vector<T>::kCount : 1;
  static constexpr int kColumns = tile::kWarpLanes * kCount * kBackwardVectors;
  float sums[kBackwardVectors][kCount];
  int64_t first_column;  // of the lane's first vector
  int64_t columns;

  __device__ __forceinline__ explicit Strip(int64_t all_columns)
      : first_column(static_cast<int64_t>(blockIdx.y) * kColumns + threadIdx.x % tile::kWarpLanes * kCount),
        columns(all_columns) {}
  __device__ __forceinline__ int64_t column(int vector) const {
    return first_column + vector * tile::kWarpLanes * kCount;
  }
  __device__ __forceinline__ void clear() {
#pragma unroll
    for (auto& vector : sums) {
#pragma unroll
      for (float& sum : vector) sum = 0;
    }
  }
  __device__ __forceinline__ void add_row(const BackwardArguments& arguments, int64_t position) {
    const int64_t offset = kVectors ? position * arguments.grad_output.leading_strides[0]
                                    : offset_of_row(arguments.grad_output, arguments.shape, position);
    const T* row = static_cast<const T*>(arguments.grad_output.data) + offset;
#pragma unroll
    for (int i = 0; i < kBackwardVectors; ++i) {
      if (column(i) >= columns) continue;
      if constexpr (kVectors) {
        float values[kCount];
        tile::load_shared_by_all<T>(row + column(i)).unpack(values);
#pragma unroll
        for (int k = 0; k < kCount; ++k) sums[i][k] += values[k];
      } else {
        sums[i][0] += tile::to_float<T>(row[column(i) * arguments.grad_output.column_stride]);
      }
    }
  }
  __device__ __forceinline__ void store(const BackwardArguments& arguments, int64_t table_row) const {
    T* row = static_cast<T*>(arguments.grad_weight) + table_row * columns;
#pragma unroll
    for (int i = 0; i < kBackwardVectors; ++i) {
      if (column(i) >= columns) continue;
      if constexpr (kVectors) {
        *reinterpret_cast<tile::Vector<T>*>(row + column(i)) = tile::Vector<T>::pack(sums[i]);
      } else {
        row[column(i)] = tile::from_float<T>(sums[i][0]);
      }
    }
  }
};

inline constexpr int kWarps = kThreads / tile::kWarpLanes;

struct BackwardShared {
  int positions[kWarps][kWarpEntries];
  uint16_t rows[kWarps][kWarpEntries];
  int entries[kWarps];            // that a warp found, listed or not
  int counts[kMostRowsPerBlock];  // positions of each row
  int starts[kMostRowsPerBlock];
  int sorted[kWarps * kWarpEntries];  // positions by row
  float partial[tile::kWarpLanes * 8 * kBackwardVectors];
};

// Calls found(position, relative row) for all lanes of a warp that hold one of `count` rows from `first_row` on; lanes
// and calls are in the order of the positions. Every warp takes its own stretch of them, kAhead loads at a time.
template <int kAhead, class Found>
__device__ __forceinline__ void scan_indices(const BackwardArguments& arguments, int64_t first_row, int count,
                                             Found found) {
  const int lane = threadIdx.x % tile::kWarpLanes, warp = threadIdx.x / tile::kWarpLanes;
  const int64_t positions = arguments.shape.rows;
  const int64_t per_warp = (positions + kThreads - 1) / kThreads * tile::kWarpLanes;
  const int64_t end = min((warp + 1) * per_warp, static_cast<long long>(positions));
  for (int64_t first = warp * per_warp; first < end; first += kAhead * tile::kWarpLanes) {
    int64_t indices[kAhead];
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      const int64_t position = first + i * tile::kWarpLanes + lane;
      indices[i] = position < end ? index_at(arguments.indices, arguments.indices_are_wide, position) : -1;
    }
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      const int64_t relative = indices[i] - first_row;
      const bool is_mine =
          indices[i] >= 0 && relative >= 0 && relative < count && indices[i] != arguments.padding_index;
      if (__any_sync(0xffffffffu, is_mine)) {
        found(static_cast<int>(first + i * tile::kWarpLanes + lane), static_cast<int>(relative), is_mine);
      }
    }
  }
}

__device__ __forceinline__ void list_positions(const BackwardArguments& arguments, int64_t first_row, int rows,
                                               BackwardShared& shared) {
  const int lane = threadIdx.x % tile::kWarpLanes, warp = threadIdx.x / tile::kWarpLanes;
  int found = 0;
  scan_indices<8>(arguments, first_row, rows, [&](int position, int row, bool is_mine) {
    const uint32_t mine = __ballot_sync(0xffffffffu, is_mine);
    const int place = found + __popc(mine & ((1u << lane) - 1));
    if (is_mine && place < kWarpEntries) {
      shared.positions[warp][place] = position;
      shared.rows[warp][place] = static_cast<uint16_t>(row);
    }
    if (is_mine) atomicAdd(&shared.counts[row], 1);
    found += __popc(mine);
  });
  if (lane == 0) shared.entries[warp] = found;
}

// Gathers each row's positions, in order: a thread looks through the lists for its row.
__device__ __forceinline__ void sort_positions(int rows, BackwardShared& shared) {
  if (threadIdx.x < tile::kWarpLanes) {  // where each row's positions begin: a lane adds up its share, lanes follow
    constexpr int kShare = kMostRowsPerBlock / tile::kWarpLanes;
    const int lane = threadIdx.x;
    int total = 0;
    for (int i = 0; i < kShare; ++i) total += lane * kShare + i < rows ? shared.counts[lane * kShare + i] : 0;
    int start = total;
#pragma unroll
    for (int distance = 1; distance < tile::kWarpLanes; distance *= 2) {
      const int before = __shfl_up_sync(0xffffffffu, start, distance);
      if (lane >= distance) start += before;
    }
    start -= total;
    for (int row = lane * kShare; row < min((lane + 1) * kShare, rows); ++row) {
      shared.starts[row] = start;
      start += shared.counts[row];
    }
  }
  __syncthreads();
  const int row = threadIdx.x;
  if (row < rows && shared.counts[row] > 0) {
    int place = shared.starts[row];
    for (int warp = 0; warp < kWarps; ++warp) {
      for (int i = 0; i < shared.entries[warp]; ++i) {
        if (shared.rows[warp][i] == row) shared.sorted[place++] = shared.positions[warp][i];
      }
    }
  }
  __syncthreads();
}

// All warps' sums of a row, added warp by warp; the result in the first warp. All threads of the block take part.
template <class Strip>
__device__ __forceinline__ void add_warps(Strip& strip, BackwardShared& shared) {
  const int lane = threadIdx.x % tile::kWarpLanes, warp = threadIdx.x / tile::kWarpLanes;
  for (int turn = 0; turn < kWarps; ++turn) {
    if (warp == turn) {
#pragma unroll
      for (int i = 0; i < kBackwardVectors; ++i) {
#pragma unroll
        for (int k = 0; k < Strip::kCount; ++k) {
          float& place = shared.partial[(i * Strip::kCount + k) * tile::kWarpLanes + lane];
          place = turn == 0 ? strip.sums[i][k] : place + strip.sums[i][k];
        }
      }
    }
    __syncthreads();
  }
#pragma unroll
  for (int i = 0; i < kBackwardVectors; ++i) {
#pragma unroll
    for (int k = 0; k < Strip::kCount; ++k) {
      strip.sums[i][k] = shared.partial[(i * Strip::kCount + k) * tile::kWarpLanes + lane];
    }
  }
  __syncthreads();
}

template <class T, bool kVectors>
__global__ void __launch_bounds__(kThreads, kBackwardBlocks)
    backward(const __grid_constant__ BackwardArguments arguments) {
  __shared__ BackwardShared shared;
  const int warp = threadIdx.x / tile::kWarpLanes;
  const int64_t first_row = static_cast<int64_t>(blockIdx.x) * arguments.rows_per_block;
  const int rows = static_cast<int>(
      min(static_cast<long long>(arguments.rows_per_block), static_cast<long long>(arguments.rows - first_row)));
  for (int i = threadIdx.x; i < rows; i += kThreads) shared.counts[i] = 0;
  __syncthreads();
  list_positions(arguments, first_row, rows, shared);
  __syncthreads();
  bool is_listed = true;
  for (int entries : shared.entries) is_listed = is_listed && entries <= kWarpEntries;
  if (is_listed) sort_positions(rows, shared);

  Strip<T, kVectors> strip(arguments.shape.columns);
  const auto is_long = [&](int row) { return shared.counts[row] > (is_listed ? kLongRow : 0); };
  for (int row = warp; row < rows; row += kWarps) {
    if (is_long(row)) continue;
    strip.clear();
    for (int i = 0; i < shared.counts[row]; ++i) strip.add_row(arguments, shared.sorted[shared.starts[row] + i]);
    strip.store(arguments, first_row + row);
  }
  // Rows with many positions by all warps; where the lists did not suffice, by looking again for each row.
  if (!__syncthreads_or(static_cast<int>(threadIdx.x) < rows && is_long(threadIdx.x))) return;
  for (int row = 0; row < rows; ++row) {
    if (!is_long(row)) continue;
    strip.clear();
    if (is_listed) {
      for (int i = warp; i < shared.counts[row]; i += kWarps) {
        strip.add_row(arguments, shared.sorted[shared.starts[row] + i]);
      }
    } else {
      scan_indices<2>(arguments, first_row + row, 1, [&](int position, int, bool is_mine) {
        for (uint32_t left = __ballot_sync(0xffffffffu, is_mine); left != 0; left &= left - 1) {
          strip.add_row(arguments, __shfl_sync(0xffffffffu, position, __ffs(left) - 1));
        }
      });
    }
    add_warps(strip, shared);
    if (warp == 0) strip.store(arguments, first_row + row);
  }
}

}  // namespace kernel_pytorch::embedding
