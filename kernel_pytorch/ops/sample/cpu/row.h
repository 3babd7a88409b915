// What crosses from the host side of the CPU kernel to the code built per instruction level (cpu/isa.h says why).
#pragma once

#include "kernel_pytorch/base/fixed_width.h"
#include "kernel_pytorch/ops/support/cpu_levels.h"

namespace kernel_pytorch::sample {

struct RowTask {
  const void* logits;
  int64_t count, top_k;
  float temperature, top_p, min_p;
  uint64_t random;  // 64 bits
};
struct RowKernels {
  int64_t (*draw[3])(const RowTask& task);  // by type: fp32, bf16, fp16
};
KP_EACH_CPU_LEVEL(extern const RowKernels kRowKernels;)

}  // namespace kernel_pytorch::sample
