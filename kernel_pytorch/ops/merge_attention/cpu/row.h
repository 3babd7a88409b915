// What crosses from the host side of the CPU kernel to the code built per instruction level (cpu/isa.h says why).
#pragma once

#include "kernel_pytorch/base/fixed_width.h"
#include "kernel_pytorch/ops/support/cpu_levels.h"

namespace kernel_pytorch::merge_attention {

// A weight of 0: the part is not read.
struct RowTask {
  const void *first, *second;
  void* output;
  int64_t size;
  float first_weight, second_weight;
};
struct RowKernels {
  void (*merge[3])(const RowTask& task);  // by type: fp32, bf16, fp16
};
KP_EACH_CPU_LEVEL(extern const RowKernels kRowKernels;)

}  // namespace kernel_pytorch::merge_attention
