// What host and device agree on for products of 8-bit integers.
#pragma once

#include "kernel_pytorch/base/fixed_width.h"
#include "kernel_pytorch/ops/engines/gemm/tile/tile_cuda.h"

namespace kernel_pytorch::int8_matmul {

inline constexpr int kThreads = 128;
inline constexpr int kRows = 64, kColumns = 64, kDepth = 64;  // of a block of threads; of k at a time
inline constexpr int kPitch = kDepth + 16;                    // bytes of a row in shared memory: all banks differ

struct ProductArguments {
  product::TileArguments tile;  // its operands are not read
  const int8_t* x;              // codes
  int64_t x_stride;
  const int8_t* weight;  // [n, k]
  const float* scale_x;
  const float* scale_weight;  // [n, groups]
  int32_t groups;
  int32_t block;  // columns of a sum in int32: a multiple of 32
};

struct RoundArguments {
  const void* x;
  int64_t x_stride;
  int32_t k;
  int8_t* codes;
  int64_t code_stride;
  float* scales;
};

}  // namespace kernel_pytorch::int8_matmul
