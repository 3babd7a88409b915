// What host and device agree on for embedding: how work is split, and the arguments of the kernels.
#pragma once

#include "kernel_pytorch/base/fixed_width.h"
#include "kernel_pytorch/ops/support/any_rows_cuda.h"

namespace kernel_pytorch::embedding {

inline constexpr int kThreads = 256;

// Rows are copied as units of 16 bytes, or of an element where they cannot be read that way.
struct ForwardArguments {
  const void* indices;
  const void* weight;
  void* output;
  int64_t positions;
  int64_t rows;               // of the table
  int64_t row_stride_units;   // of the table
  int64_t unit_stride_units;  // between the units of a row of the table
  int32_t row_units;
  uint32_t nan_word;  // what an index outside the table leaves, as often as it fits
  bool indices_are_wide;
};
inline constexpr int kForwardUnits = 4;  // of a thread

struct BackwardArguments {
  AnyShape shape;  // positions and columns
  AnyTensor grad_output;
  const void* indices;
  void* grad_weight;
  int64_t rows;
  int64_t padding_index;
  int32_t rows_per_block;
  bool indices_are_wide;
};
inline constexpr int kBackwardBlocks = 3;  // of a multiprocessor
inline constexpr int kMostRowsPerBlock = kThreads;
inline constexpr int kBackwardVectors = 4;  // of a lane: with 32 lanes a block's columns
inline constexpr int kWarpEntries = 256;    // positions that a warp of a block can list
inline constexpr int kLongRow = 48;         // positions from which on all warps share a row

}  // namespace kernel_pytorch::embedding
