// What crosses from the host side of the CPU kernel to the code built per instruction level (cpu/isa.h says why): some
// rows of the weight times a panel of rows of x, which lies across: the panel's rows are neighbours.
#pragma once

#include "kernel_pytorch/base/fixed_width.h"
#include "kernel_pytorch/ops/support/cpu_levels.h"

namespace kernel_pytorch::sparse_matmul {

inline constexpr int64_t kPanelRows = 64;  // of x, at every level a multiple of the lanes

// Kept values of one row of the weight and the columns that they multiply, times kPanelRows.
struct RowPart {
  const float* panel;  // [k, kPanelRows]
  int64_t vectors;     // of a level's lanes that have rows of x
  const float* values;
  const int32_t* offsets;
  int64_t count;
  float* sums;  // [kPanelRows]
};

// Few rows of x times some rows of the weight as they lie: what a kept value meets is picked out of a register of x.
inline constexpr int64_t kFewRows = 4;   // of x at a time
inline constexpr int64_t kTileRows = 8;  // of the weight: their metadata of a block of columns is one cache line

struct FewPart {
  const float* x;  // [kFewRows, x_stride], zeros behind the last column up to a whole word of metadata
  int64_t x_stride, x_rows;
  const void* values;  // [rows, columns / 2], in the weight's type
  int64_t columns, rows;
  const uint32_t* metadata;  // of the first of these rows
  int64_t block_stride;      // from one block of columns to the next, in words
  float* sums;               // [rows, kFewRows]
};

struct RowKernels {
  int64_t lanes;
  void (*multiply)(const RowPart& part);
  void (*few[3])(const FewPart& part);  // values in fp32, bf16, fp16
};
KP_EACH_CPU_LEVEL(extern const RowKernels kRowKernels;)

}  // namespace kernel_pytorch::sparse_matmul
