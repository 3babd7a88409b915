// What crosses from the host side of append on the CPU to the code built per instruction level.
#pragma once

#include "kernel_pytorch/base/fixed_width.h"
#include "kernel_pytorch/ops/support/cpu_levels.h"

namespace kernel_pytorch::paged_attention {

// A row of a head on its way into the cache. Columns have unit stride.
struct AppendRow {
  const void* from = nullptr;
  void* to = nullptr;
  int64_t size = 0;
  float divisor = 1;           // of codes
  const float* cos = nullptr;  // [pairs], or null: not turned
  const float* sin = nullptr;
  int64_t pairs = 0;
  bool interleaved = false;
  float* space = nullptr;  // [size], used where the row is turned
};

struct AppendKernels {
  void (*write[3])(const AppendRow&);  // into caches of the row's type, e4m3, int8
  void (*widen)(const void* from, float* to, int64_t count);
};

KP_EACH_CPU_LEVEL(extern const AppendKernels kAppendKernels[3];)  // rows in fp32, bf16, fp16

}  // namespace kernel_pytorch::paged_attention
