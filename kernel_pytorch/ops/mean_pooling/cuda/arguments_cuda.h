// What host and device agree on for the poolings: how work is split, and the arguments of the kernels.
#pragma once

#include "kernel_pytorch/base/fixed_width.h"

namespace kernel_pytorch::mean_pooling {

inline constexpr int kThreads = 256;
// Forward: 4 blocks of 256 threads with 8 vectors each keep 128 KiB on their way to a multiprocessor.
inline constexpr int kBlocksPerMultiprocessor = 4, kAhead = 8;

// Which tokens a mean is over: those between two offsets, or a chunk.
struct Means {
  const void* offsets;  // null: chunks
  int64_t tokens;
  int64_t chunk;
  int32_t count;  // of a batch
  int32_t inner;
  bool offsets_are_wide;
};

struct ForwardArguments {
  Means means;
  const void* x;
  void* output;
  int64_t batch_stride, token_stride, inner_stride, column_stride;  // of x, in elements
  int64_t columns;
  int32_t lanes;      // threads that share a token: a power of two
  int32_t parts;      // blocks that share a mean
  float* partials;    // [rows, parts, columns] with more than one part
  uint32_t* arrived;  // [rows, strips] zeros, likewise
};

struct BackwardArguments {
  Means means;
  const void* grad_output;
  void* grad_input;
  int64_t rows;  // batch * tokens * inner
  int64_t columns;
  int32_t lanes;  // threads that share a row: a power of two
  bool is_small;  // rows and chunk fit 32 bits
};

}  // namespace kernel_pytorch::mean_pooling
