// What crosses from the host side of the CPU kernels to the code built per instruction level: plain pointers and
// strides, no class with functions (cpu/isa.h says why). Rows have unit column stride.
#pragma once

#include "kernel_pytorch/base/fixed_width.h"
#include "kernel_pytorch/ops/engines/pointwise/kind_cuda.h"
#include "kernel_pytorch/ops/support/cpu_levels.h"

namespace kernel_pytorch::row_norm {

struct ForwardRows {
  int64_t rows = 0;
  int64_t columns = 0;
  const void* x = nullptr;         // first row of the block; likewise below
  const void* residual = nullptr;  // null: none
  const void* weight = nullptr;    // null: ones
  const void* bias = nullptr;      // null: zeros
  void* output = nullptr;
  void* sum = nullptr;
  void* mean = nullptr;  // null: not wanted
  void* rstd = nullptr;
  int64_t x_stride_elements = 0;
  int64_t residual_stride_elements = 0;
  double eps = 0;
  double weight_offset = 0;
  bool centered = false;         // layer norm: subtract the mean
  bool stream_stores = false;    // output past the caches; rows of output are then 64-byte aligned
  bool narrow_residual = false;  // of the narrow type of Types; likewise the output
  bool narrow_output = false;
  pointwise::Kind activation = pointwise::Kind::kIdentity;
};

struct BackwardRows {
  int64_t rows = 0;
  int64_t columns = 0;
  const void* grad_output = nullptr;
  const void* value = nullptr;
  const void* weight = nullptr;
  const void* mean = nullptr;
  const void* rstd = nullptr;
  const void* grad_sum = nullptr;  // null: none
  void* grad_input = nullptr;      // null: not wanted
  void* weight_partial = nullptr;  // [columns] sums of this block, fp32 (fp64 for fp64), added to; null: not wanted
  void* bias_partial = nullptr;
  int64_t grad_output_stride_elements = 0;
  int64_t value_stride_elements = 0;
  int64_t grad_sum_stride_elements = 0;
  double weight_offset = 0;
  bool centered = false;
  bool stream_stores = false;
};

// Columns [0, columns) of `blocks` partial sums, added in the order of the blocks.
struct PartialSums {
  int64_t blocks = 0;
  int64_t columns = 0;
  int64_t block_stride_elements = 0;
  const void* partials = nullptr;
  void* total = nullptr;  // the weight's type
};

// Pairs of (x's type, weight's type) that the kernels are built for; the last two are fp32 with a 16-bit
// residual or output (grad_output in the backward).
enum class Types : int {
  kFloat,
  kDouble,
  kBFloat16,
  kBFloat16Float,
  kFloat16,
  kFloat16Float,
  kFloatWithBFloat16,
  kFloatWithFloat16
};
inline constexpr int kTypesCount = 8;

struct RowKernels {
  void (*forward)(const ForwardRows&);
  void (*backward)(const BackwardRows&);
  void (*add_partials)(const PartialSums&);
};

// One table per instruction level, defined by engines/row_norm/cpu/kernel_isa.cpp; indexed by Types.
KP_EACH_CPU_LEVEL(extern const RowKernels kRowKernels[kTypesCount];)

}  // namespace kernel_pytorch::row_norm
