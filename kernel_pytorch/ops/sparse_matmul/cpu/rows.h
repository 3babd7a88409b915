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

struct RowKernels {
  int64_t lanes;
  void (*multiply)(const RowPart& part);
};
KP_EACH_CPU_LEVEL(extern const RowKernels kRowKernels;)

}  // namespace kernel_pytorch::sparse_matmul
