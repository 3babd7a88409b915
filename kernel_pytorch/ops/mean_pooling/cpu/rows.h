// What crosses from the host side of the CPU kernels to the code built per instruction level (cpu/isa.h says why).
#pragma once

#include "kernel_pytorch/base/fixed_width.h"
#include "kernel_pytorch/ops/support/cpu_levels.h"

namespace kernel_pytorch::mean_pooling {

struct RowKernels {
  // totals[j] += the sum over `count` rows of row[j], rows in their order; unit column stride.
  void (*add_rows)(const void* rows, int64_t row_stride_elements, int64_t count, int64_t columns, float* totals);
  // to[j] = from[j] / count.
  void (*divide_floats)(void* to, const float* from, float count, int64_t columns);
  // The same for so many rows of `to`, one after another; `streams` past the caches where to is aligned to 64 bytes.
  void (*divide_rows)(void* to, int64_t row_stride_elements, int64_t rows, const void* from, float count,
                      int64_t columns, bool streams);
};

// By type: fp32, bf16, fp16.
inline constexpr int kTypesCount = 3;
KP_EACH_CPU_LEVEL(extern const RowKernels kRowKernels[kTypesCount];)

}  // namespace kernel_pytorch::mean_pooling
