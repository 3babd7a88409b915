// What crosses from the host side of the CPU kernel to the code built per instruction level (cpu/isa.h says why).
#pragma once

#include "kernel_pytorch/base/fixed_width.h"
#include "kernel_pytorch/ops/support/cpu_levels.h"

namespace kernel_pytorch::reduce_norm {

// Sums of squares of a stretch of elements, in the order fp32, fp64, bf16, fp16.
struct ChunkKernels {
  double (*sum_squares[4])(const void* elements, int64_t count);
};

KP_EACH_CPU_LEVEL(extern const ChunkKernels kChunkKernels;)

}  // namespace kernel_pytorch::reduce_norm
