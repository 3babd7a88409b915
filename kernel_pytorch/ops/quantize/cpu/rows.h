// What crosses from the host side of the CPU kernel to the code built per instruction level (cpu/isa.h says why).
#pragma once

#include "kernel_pytorch/base/fixed_width.h"
#include "kernel_pytorch/ops/support/cpu_levels.h"

namespace kernel_pytorch::quantize {

struct RowKernels {
  // Bits of the largest finite magnitude of a row, which are also raised in `columns` one by one; *found_nonfinite is
  // set where there is an infinity or a NaN.
  uint32_t (*measure)(const void* row, int64_t count, uint32_t* columns, bool* found_nonfinite);
  // codes[j] = row[j] * inverse, or where inverses are given row[j] * inverses[j]; by format: e4m3, e5m2.
  void (*cast[2])(const void* row, int64_t count, float inverse, const float* inverses, uint8_t* codes);
};

// By type: fp32, bf16, fp16.
inline constexpr int kTypesCount = 3;
KP_EACH_CPU_LEVEL(extern const RowKernels kRowKernels[kTypesCount];)

}  // namespace kernel_pytorch::quantize
