// What crosses from the host side of the CPU kernel to the code built per instruction level (cpu/isa.h says why).
#pragma once

#include "kernel_pytorch/base/fixed_width.h"

namespace kernel_pytorch::reduce_norm {

// Sums of squares of a stretch of elements, in the order fp32, fp64, bf16, fp16.
struct ChunkKernels {
  double (*sum_squares[4])(const void* elements, int64_t count);
};

namespace isa_v2 {
extern const ChunkKernels kChunkKernels;
}
namespace isa_v3 {
extern const ChunkKernels kChunkKernels;
}
namespace isa_v4 {
extern const ChunkKernels kChunkKernels;
}
namespace isa_neon {
extern const ChunkKernels kChunkKernels;
}

}  // namespace kernel_pytorch::reduce_norm
