// What host and device agree on for the pointwise kernels: the arguments, and how work is spread over threads.
#pragma once

#include "kernel_pytorch/base/fixed_width.h"
#include "kernel_pytorch/ops/engines/pointwise/kind_cuda.h"
#include "kernel_pytorch/ops/support/any_rows_cuda.h"
#include "kernel_pytorch/ops/support/divider_cuda.h"

namespace kernel_pytorch::pointwise {

inline constexpr int kThreads = 256;  // of a block

// A tensor of rows with stride-1 columns, 16-byte aligned. Absent: data is null.
struct RowTensor {
  const void* data;
  int64_t row_stride_bytes;
};

// Dropout keeps an element whose 16 bits, moved to the top of a word, are more than `limit`. No dropout: seed is null.
struct DropoutArguments {
  const int64_t* seed;  // and the offset
  uint32_t limit;
  float scale;
};

// Vectors of 16 bytes, counted row by row.
struct VectorShape {
  int64_t rows;
  uint32_t vectors;     // in all, below 2^31
  Divider row_vectors;  // of one row
};

struct ForwardArguments {
  VectorShape shape;
  RowTensor gate, up, residual, output;
  const void* gate_bias;
  const void* up_bias;
  DropoutArguments dropout;
  Kind kind;
  bool bias_is_float;  // otherwise of the rows' type
};

struct BackwardArguments {
  VectorShape shape;
  RowTensor grad_output, gate, up, grad_gate, grad_up;
  const void* gate_bias;
  const void* up_bias;
  DropoutArguments dropout;
  float* gate_partial;  // [gridDim.y, columns]: backward_columns only; null: not wanted
  float* up_partial;
  int32_t rows_per_block;  // backward_columns only
  Kind kind;
  bool bias_is_float;
};

// A block of backward_columns: so many vectors of a row side by side, so many rows at a time.
inline constexpr int kTileVectors = 32;
inline constexpr int kTileRows = kThreads / kTileVectors;

struct AnyForwardArguments {
  AnyShape shape;
  AnyTensor gate, up, residual, gate_bias, up_bias;
  void* output;  // contiguous
  DropoutArguments dropout;
  Kind kind;
  bool bias_is_float;
};

struct AnyBackwardArguments {
  AnyShape shape;
  AnyTensor grad_output, gate, up, gate_bias, up_bias, grad_gate, grad_up;
  DropoutArguments dropout;
  float* gate_partial;  // [gridDim.y, columns]; null: not wanted
  float* up_partial;
  int64_t rows_per_block;
  Kind kind;
  bool bias_is_float;
};

// A block of the kernels for any strides takes so many columns of a range of rows, so many rows at a time.
inline constexpr int kAnyColumns = 32;
inline constexpr int kAnyRows = kThreads / kAnyColumns;

}  // namespace kernel_pytorch::pointwise
