// What crosses from the host side of the CPU kernels to the code built per instruction level (cpu/isa.h says why).
#pragma once

#include "kernel_pytorch/base/fixed_width.h"
#include "kernel_pytorch/ops/support/cpu_levels.h"

namespace kernel_pytorch::embedding {

// The sum of the rows at these positions, in their order; 0 without any.
struct RowSumArguments {
  const void* rows = nullptr;  // unit column stride
  int64_t row_stride_elements = 0;
  const int32_t* positions = nullptr;
  int64_t count = 0;
  int64_t columns = 0;
  void* sum = nullptr;
  bool streams = false;  // past the caches; sum is then aligned to 64 bytes
};

// A row that is copied past the caches: `to` and bytes are multiples of 64.
struct CopiedRow {
  void* to;
  const void* from;
  const void* next;  // the row that is copied after this one; null: none, and what was written is there for all
  int64_t bytes;
};

struct RowKernels {
  void (*copy)(const CopiedRow& row);
  void (*sum_rows[4])(const RowSumArguments&);  // fp32, fp64, bf16, fp16
};

KP_EACH_CPU_LEVEL(extern const RowKernels kRowKernels;)

}  // namespace kernel_pytorch::embedding
