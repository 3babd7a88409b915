// What host and device agree on for the kernels on mma.m16n8k16: tiles, and the arguments of each kernel.
#pragma once

#include "kernel_pytorch/ops/attention/attention_cuda.h"

namespace kernel_pytorch::attention {

// One kernel is compiled for each value. A block keeps warps * row_blocks * 16 rows of one operand (queries, or keys
// for their gradients) and steps over `columns` rows of the other.
struct MmaTile {
  int size;  // columns of query and key, and of value: real ones are filled up with zeros
  int value_size;
  int slice;  // columns of the results that a block computes: more would not fit its registers
  int warps;
  int row_blocks;  // of 16 rows each, that a warp holds
  int columns;
  int stages;  // tiles of the walk in shared memory
};

KP_SHARED_CODE constexpr int rows_of(MmaTile tile) {
  return tile.warps * tile.row_blocks * 16;
}
// A row in shared memory: 16 bytes more than its elements, so that eight rows at one column lie in eight banks.
KP_SHARED_CODE constexpr int pitch_bytes(int columns) {
  return columns * 2 + 16;
}
KP_SHARED_CODE constexpr int slices_of(int columns, int slice) {
  return (columns + slice - 1) / slice;
}
KP_SHARED_CODE constexpr int forward_shared_bytes(MmaTile tile) {
  return rows_of(tile) * pitch_bytes(tile.size) +
         tile.stages * tile.columns * (pitch_bytes(tile.size) + pitch_bytes(tile.slice));
}

struct MmaForwardArguments {
  ScoreArguments scores;
  RowTensor query, key, value, output;
  float* lse;  // null: not wanted
  int32_t size, value_size;
  int32_t tiles;  // of the longest sequence's queries
};

}  // namespace kernel_pytorch::attention
