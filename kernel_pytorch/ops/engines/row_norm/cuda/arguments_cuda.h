// What host and device agree on for the row norms: how a row is spread over threads, and the arguments of the kernels.
// Rows of these kernels have stride-1 columns and 16-byte aligned starts, and lie along up to three dimensions (batch,
// sequence, head); engines/row_norm/cuda/any_cuda.h covers the rest.
#pragma once

#include "kernel_pytorch/base/fixed_width.h"
#include "kernel_pytorch/ops/engines/pointwise/kind_cuda.h"
#include "kernel_pytorch/ops/support/divider_cuda.h"

namespace kernel_pytorch::row_norm {

// Where a row waits for its turn: nowhere (loaded when needed), in registers (the next row's loads are issued before
// this row is finished), in a ring of rows in shared memory that the copy engine keeps full (sm_90), or in such a ring
// that every thread fills and empties for itself, without a barrier.
enum class Source : uint8_t { kDirect, kPrefetch, kRing, kAsync };

// Where weight and bias wait: in L2, read again for each row; in registers; or, as far as a block needs them, in shared
// memory, as they are or as floats with the offset added. All but the first pay off over the rows of a block.
enum class Weight : uint8_t { kReread, kRegisters, kShared, kSharedFloat };

// What is compiled: one kernel for each value.
struct RowConfig {
  int threads = 32;      // of a block
  int row_threads = 32;  // that share a row: a power of two
  int vectors = 1;       // 16-byte vectors of a row that a thread holds in registers
  Source source = Source::kDirect;
  bool clustered = false;           // a row is spread over the blocks of a cluster (sm_90)
  Weight weight = Weight::kReread;  // in shared memory: forward only
  int blocks = 1;                   // resident per multiprocessor, which limits registers
};

inline constexpr int kMaxStages = 16;
inline constexpr int kAsyncStages = 4;  // of a kAsync ring: cp.async waits for a count known when compiled

KP_SHARED_CODE constexpr bool is_legal(const RowConfig& config) {
  const bool whole_block = config.row_threads == config.threads;
  return config.threads >= 32 && config.threads <= 1024 && config.threads % 32 == 0 &&
         config.threads % config.row_threads == 0 && (config.row_threads & (config.row_threads - 1)) == 0 &&
         (config.row_threads <= 32 || config.threads / config.row_threads <= 15) && config.vectors >= 1 &&
         config.vectors <= 16 && (whole_block || (config.source <= Source::kPrefetch && !config.clustered)) &&
         config.blocks >= 1 && config.threads * config.blocks <= 2048;
}

// The type of a tensor that may be narrower than the fp32 rows. The kernel reads it at run time: these kernels are
// memory-bound, and one more kernel per type would only cost compile time.
enum class MixedType : uint8_t { kSame, kBFloat16, kFloat16 };

// A tensor of rows. Absent: data is null. The outer strides are those of kernels for rows of several strides.
struct RowTensor {
  const void* data;
  int64_t row_stride_bytes;  // of the innermost dimension of rows
  MixedType type;
  int64_t middle_stride_bytes;
  int64_t outer_stride_bytes;
};

struct RowShape {
  int64_t rows;
  int32_t columns;
  int32_t slice_vectors;  // 16-byte vectors of a row that one block of a cluster takes; all of them without a cluster
  int32_t stages;         // of the ring
  Divider inner, middle;  // rows of the innermost dimension, and of the one around it
};

struct ForwardArguments {
  RowShape shape;
  RowTensor inputs[2];  // x, residual
  const void* weight;   // null: ones
  const void* bias;     // null: zeros
  void* output;         // contiguous
  void* sum;            // contiguous, with a residual
  float* mean;          // null: not wanted
  float* rstd;
  float eps;
  float weight_offset;
  MixedType output_type;
  pointwise::Kind activation;  // of kernels that are compiled with one
};

struct BackwardArguments {
  RowShape shape;
  RowTensor inputs[3];  // grad_output, value, grad_sum
  const void* weight;
  const float* mean;
  const float* rstd;
  void* grad_input;       // contiguous; null: not wanted
  float* weight_partial;  // [row groups, columns]; null: not wanted
  float* bias_partial;
  float weight_offset;
  bool weight_is_float;
};

}  // namespace kernel_pytorch::row_norm
