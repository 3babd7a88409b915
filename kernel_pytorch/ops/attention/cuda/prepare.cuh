// Small kernels that run before or after attention's own: ranges of segment ids, maps of block lists, their counts in
// packed sequences, rows of packed tensors past the last sequence.
#pragma once

#include "kernel_pytorch/cuda/tile/dependent_launch.cuh"
#include "kernel_pytorch/ops/attention/cuda/arguments_cuda.h"

namespace kernel_pytorch::attention {

// A warp for each 64 rows. A lane's two rows lie side by side, so that changes of ids are seen by a shuffle.
__global__ void segment_ranges(SegmentIds segments, SegmentRange* ranges, int32_t rows) {
  static_assert(kSegmentRangeRows == 64);
  tile::let_next_kernel_start();
  const int32_t blocks = (rows + kSegmentRangeRows - 1) / kSegmentRangeRows;
  const int64_t batch = static_cast<int32_t>(blockIdx.x) / blocks, block = static_cast<int32_t>(blockIdx.x) % blocks;
  const int32_t* ids = segments.ids + batch * segments.batch;
  const int32_t first = static_cast<int32_t>(block) * kSegmentRangeRows;
  const int32_t lane = static_cast<int32_t>(threadIdx.x), row = first + 2 * lane;
  // Rows beyond the last have its id.
  const int32_t id = ids[least(row, rows - 1) * segments.row], next = ids[least(row + 1, rows - 1) * segments.row];
  int32_t low = least(id, next), high = greatest(id, next);
  const int32_t previous = __shfl_up_sync(0xffffffffu, next, 1);
  const uint32_t even = __ballot_sync(0xffffffffu, lane > 0 && previous != id);
  const uint32_t odd = __ballot_sync(0xffffffffu, id != next);
  int32_t split = kSegmentRangeRows;
  if (even != 0) split = 2 * __ffs(static_cast<int>(even)) - 2;
  if (odd != 0) split = least(split, 2 * __ffs(static_cast<int>(odd)) - 1);
  if (__popc(even) + __popc(odd) > 1) split = 0;
  for (int distance = 16; distance > 0; distance /= 2) {
    low = least(low, __shfl_xor_sync(0xffffffffu, low, distance));
    high = greatest(high, __shfl_xor_sync(0xffffffffu, high, distance));
  }
  if (threadIdx.x != 0) return;
  ranges[batch * segments.ranges_batch + block] = {low, high, id, split};
}

// A block for each row of tiles: states of the listed ones, into a map of zeros.
__global__ void map_blocks(BlockLists lists, BlockMap map, int32_t heads, int32_t rows) {
  const int64_t row = static_cast<int32_t>(blockIdx.x) % rows, unit = static_cast<int32_t>(blockIdx.x) / rows;
  const int64_t batch = unit / heads, head = unit % heads;
  for (int full = 0; full < 2; ++full) {
    const BlockIndex& index = full != 0 ? lists.full : lists.partial;
    if (index.counts == nullptr) continue;
    const int32_t count = index.counts[batch * index.counts_batch + head * index.counts_head + row * index.counts_row];
    const int32_t* blocks =
        index.blocks + batch * index.blocks_batch + head * index.blocks_head + row * index.blocks_row;
    uint8_t* states = const_cast<uint8_t*>(map.states) + batch * map.batch + head * map.head + row * map.row;
    for (int32_t i = static_cast<int32_t>(threadIdx.x); i < count; i += static_cast<int32_t>(blockDim.x)) {
      const int32_t block = blocks[i * index.blocks_place];
      if (block >= 0 && block < map.row) states[block] = full != 0 ? kFullBlock : kPartialBlock;
    }
  }
}

// Counts, in ascending lists, the blocks that begin before a packed sequence ends: counts [sequences, heads, rows].
// `offsets` are those of the columns, `block` columns are a block; at most `longest` are a sequence. A thread a list.
__global__ void trim_lists(BlockIndex index, const int32_t* offsets, int32_t sequences, int32_t heads, int32_t rows,
                           int32_t block, int32_t longest, int32_t* counts) {
  const int64_t list = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  const int64_t sequence = list / (int64_t{heads} * rows), head = list / rows % heads, row = list % rows;
  if (sequence >= sequences) return;
  const int32_t columns = least(offsets[sequence + 1] - offsets[sequence], longest);
  const int32_t* blocks =
      index.blocks + sequence * index.blocks_batch + head * index.blocks_head + row * index.blocks_row;
  int32_t low = 0;
  int32_t high = index.counts[sequence * index.counts_batch + head * index.counts_head + row * index.counts_row];
  while (low < high) {
    const int32_t middle = (low + high) / 2;
    if (int64_t{blocks[middle * index.blocks_place]} * block < columns) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  counts[list] = low;
}

// Rows of packed tensors past the last offset: zeros, and -inf where they are an lse. A block for each row in turn.
__global__ void clear_rows_past_sequences(RowTensor rows, float* lse, const int32_t* offsets, int32_t sequences,
                                          int64_t tokens, int32_t columns) {
  const int64_t head = blockIdx.y;
  for (int64_t row = offsets[sequences] + static_cast<int64_t>(blockIdx.x); row < tokens; row += gridDim.x) {
    uint16_t* target = static_cast<uint16_t*>(rows.data) + head * rows.head + row * rows.row;
    for (int32_t column = static_cast<int32_t>(threadIdx.x); column < columns; column += blockDim.x) target[column] = 0;
    if (lse != nullptr && threadIdx.x == 0) lse[head * tokens + row] = __int_as_float(0xff800000);
  }
}

}  // namespace kernel_pytorch::attention
