// What host and device agree on: a thread has 16 neighbouring columns of a row, and the threads of a group are
// neighbours.
#pragma once

#include "kernel_pytorch/base/fixed_width.h"
#include "kernel_pytorch/ops/support/divider_cuda.h"
#include "kernel_pytorch/ops/support/group_format/format_cuda.h"

namespace kernel_pytorch::group_quantize {

inline constexpr int kThreads = 256;
inline constexpr int kUnit = 16;  // columns of a thread

struct QuantizeArguments {
  const void* x;
  int64_t row_stride;  // elements
  int64_t rows;
  int32_t columns, group, groups;  // groups of a row
  const float* tensor_scale;       // or null
  const int64_t* seed;             // with stochastic rounding
  uint8_t* codes;
  int64_t code_stride;  // bytes
  void* scales;
  uint8_t* zeros;  // or null
  // Of bf16 to E2M1 by warps of 512 columns: how many there are, those of a row, elements between rows.
  uint32_t warps;
  Divider warps_of_row;
  int64_t row_gap;
};

// kPaired: how a warp's lanes load (kernel.cuh).
struct QuantizeConfig {
  bool paired = false;
};
KP_SHARED_CODE constexpr bool is_legal(const QuantizeConfig&) {
  return true;
}

struct DequantizeArguments {
  const uint8_t* codes;
  int64_t code_stride;  // bytes
  int64_t rows;
  int32_t columns, group, groups;
  const void* scales;
  group_format::ScaleType scale_type;
  const uint8_t* zeros;       // or null
  const float* tensor_scale;  // or null
  void* output;
  int64_t row_stride;  // elements
};

}  // namespace kernel_pytorch::group_quantize
