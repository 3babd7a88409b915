// What host and device agree on: a warp takes a tile, each thread four numbers of either half.
#pragma once

#include "kernel_pytorch/ops/gradient_code/code_cuda.h"

namespace kernel_pytorch::gradient_code {

inline constexpr int kThreads = 256;
inline constexpr int kTilesOfBlock = kThreads / 32;

struct EncodeArguments {
  const void* x;
  float* error;  // or null
  uint8_t* codes;
  float* scales;
  int64_t count, code_stride, scale_stride;
  int32_t tiles, tiles_of_row;
  float gain;
  bool carries;
  bool is_aligned;  // numbers may be taken four at a time
};
struct DecodeArguments {
  const uint8_t* codes;
  const float* scales;
  void* output;
  int64_t count, code_stride, scale_stride;
  int32_t tiles, tiles_of_row, rows;  // rows: of a mean, else 1
  bool is_mean, adds;
  bool is_aligned;
};

}  // namespace kernel_pytorch::gradient_code
