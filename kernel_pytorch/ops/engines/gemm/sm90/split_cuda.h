// What host and device agree on for operands of fp32 that wgmma cannot take as they lie (split.cuh).
#pragma once

#include "kernel_pytorch/base/fixed_width.h"

namespace kernel_pytorch::product {

inline constexpr int kSplitThreads = 256;
inline constexpr int kSplitGroup = 16;             // floats along k whose parts stand together
inline constexpr int kSplitRows = 8;               // of a block, where k is dense: one of each warp
inline constexpr int kSplitChunk = 1024;           // of k, of a block there
inline constexpr int kSplitEdge = 64;              // a block's rows and k, where rows lie side by side
inline constexpr int kSplitPitch = 65;             // of its tile in shared memory
inline constexpr int kSplitCarefulExponent = 190;  // of fp32's bits: from 2^63 on products may overflow

struct SplitArguments {
  const float* data;
  int64_t batch, stride;  // of the source: from a batch to the next, and of the dimension that is not dense
  float* target;          // [batches, rows, depth], with parts twice the depth
  float* row_sums;        // null, or of the first batch [chunks of k, rows]
  int32_t* careful;       // of parts: set to 1 where a value is not finite, or so large that a product may overflow
  int32_t rows, k;
  int32_t depth;  // k rounded up to whole groups, which are filled with zeros
};

}  // namespace kernel_pytorch::product
