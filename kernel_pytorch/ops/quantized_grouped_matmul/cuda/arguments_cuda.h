// What host and device agree on for grouped products with weights in few bits.
#pragma once

#include "kernel_pytorch/ops/engines/gemm/tile/tile_cuda.h"
#include "kernel_pytorch/ops/support/group_format/format_cuda.h"

namespace kernel_pytorch::quantized_grouped_matmul {

// Of a block of threads: rows and columns of the output, and columns of k at a time.
inline constexpr int kEdge = 64, kDepth = 64;
inline constexpr int kPitch = kDepth + 8;  // elements of a row in shared memory: all banks differ
inline constexpr int kUnit = 16;           // columns of a row of the weight that a thread decodes
static_assert(kEdge * kDepth / kUnit == product::kTileThreads);

struct Arguments {
  product::GroupedTileArguments grouped;  // its operand b is not read
  const uint8_t* codes;                   // [groups * n, code_stride]
  int64_t code_stride;
  const void* scales;  // bytes, or of x's type
  group_format::ScaleType scale_type;
  const uint8_t* zeros;       // or null
  const float* tensor_scale;  // or null
  int32_t group;              // columns that share a scale
  int32_t scales_of_row;
};

}  // namespace kernel_pytorch::quantized_grouped_matmul
