// What host and device agree on for softmax: how a row is spread over threads, and the arguments of the kernels.
// Rows of these kernels have stride-1 columns and 16-byte aligned starts; cuda_any covers the rest.
#pragma once

#include "kernel_pytorch/ops/support/any_rows_cuda.h"

namespace kernel_pytorch::softmax {

// What is compiled: one kernel for each value.
struct RowConfig {
  int threads = 32;        // of a block
  int row_threads = 32;    // that share a row: a power of two up to 32, or all threads of the block
  int vectors = 1;         // 16-byte vectors of a row that a thread holds in registers
  int blocks = 1;          // resident per multiprocessor, which limits registers
  bool clustered = false;  // a row is spread over the blocks of a cluster (sm_90)
};

KP_SHARED_CODE constexpr bool is_legal(const RowConfig& config) {
  const bool whole_block = config.row_threads == config.threads;
  return config.threads >= 32 && config.threads <= 1024 && config.threads % 32 == 0 &&
         (whole_block || (config.row_threads <= 32 && !config.clustered)) &&
         (config.row_threads & (config.row_threads - 1)) == 0 && config.vectors >= 1 && config.vectors <= 8 &&
         config.blocks >= 1 && config.threads * config.blocks <= 2048;
}

enum class MaskKind : uint8_t { kNone, kBool, kSameType, kFloat };

struct RowTensor {
  const void* data;
  int64_t row_stride_bytes;
};

struct RowShape {
  int64_t rows;
  int32_t columns;
  int32_t slice_vectors;  // 16-byte vectors of a row that one block of a cluster takes; all of them without a cluster
};

struct ForwardArguments {
  RowShape shape;
  RowTensor x;
  void* output;         // contiguous
  AnyShape mask_shape;  // a mask's leading dimensions merge differently from x's
  AnyTensor mask;
  int64_t queries;
  float scale;
  MaskKind mask_kind;
  bool causal;
  bool log;
  bool empty_is_zero;
};

struct BackwardArguments {
  RowShape shape;
  RowTensor grad_output, output;
  void* grad_input;  // contiguous
  float scale;
  bool log;
  bool masked;
};

struct AnyForwardArguments {
  AnyShape shape;
  AnyTensor x;
  void* output;
  AnyShape mask_shape;
  AnyTensor mask;
  int64_t queries;
  float scale;
  MaskKind mask_kind;
  bool causal;
  bool log;
  bool empty_is_zero;
};

struct AnyBackwardArguments {
  AnyShape shape;
  AnyTensor grad_output, output;
  void* grad_input;
  float scale;
  bool log;
  bool masked;
};

// Columns of a row that causality leaves.
KP_SHARED_CODE constexpr int64_t causal_columns(int64_t row, int64_t queries, int64_t columns) {
  const int64_t visible = row % queries + columns - queries + 1;
  return visible < 0 ? 0 : visible < columns ? visible : columns;
}

}  // namespace kernel_pytorch::softmax
