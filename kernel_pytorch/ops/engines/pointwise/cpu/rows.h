// What crosses from the host side of the CPU kernels to the code built per instruction level: plain pointers and
// strides, no class with functions (cpu/isa.h says why). Rows have unit column stride.
#pragma once

#include "kernel_pytorch/base/fixed_width.h"
#include "kernel_pytorch/ops/engines/pointwise/kind_cuda.h"
#include "kernel_pytorch/ops/support/cpu_levels.h"

namespace kernel_pytorch::pointwise {

// A tensor's first row of a block and the distance to the next. Absent: data is null.
struct RowsOf {
  void* data = nullptr;
  int64_t stride_elements = 0;
};

struct DropoutRows {
  uint64_t seed = 0;
  uint64_t offset = 0;
  uint32_t threshold = 0;  // 0: no dropout
  float scale = 1;
  int64_t first_element = 0;  // of the block's first row, in the contiguous output
};

struct ForwardRows {
  Kind kind = Kind::kIdentity;
  int64_t rows = 0;
  int64_t columns = 0;
  RowsOf gate, up, residual, output;
  const void* gate_bias = nullptr;
  const void* up_bias = nullptr;
  DropoutRows dropout;
  bool bias_is_float = false;
  bool stream_stores = false;  // rows of the output are then 64-byte aligned
};

struct BackwardRows {
  Kind kind = Kind::kIdentity;
  int64_t rows = 0;
  int64_t columns = 0;
  RowsOf grad_output, gate, up, grad_gate, grad_up;
  const void* gate_bias = nullptr;
  const void* up_bias = nullptr;
  float* gate_partial = nullptr;  // [columns] sums of this block, added to; null: not wanted
  float* up_partial = nullptr;
  DropoutRows dropout;
  bool bias_is_float = false;
  bool stream_stores = false;
};

// By element type: fp32, bf16, fp16.
inline constexpr int kTypesCount = 3;

struct RowKernels {
  void (*forward)(const ForwardRows&);
  void (*backward)(const BackwardRows&);
};

KP_EACH_CPU_LEVEL(RowKernels row_kernels(int type);)

}  // namespace kernel_pytorch::pointwise
