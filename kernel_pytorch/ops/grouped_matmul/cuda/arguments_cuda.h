// What host and device agree on for the pieces around grouped products on CUDA: gates of rows, sums of groups.
#pragma once

#include "kernel_pytorch/base/fixed_width.h"
#include "kernel_pytorch/ops/engines/pointwise/kind_cuda.h"

namespace kernel_pytorch::grouped_matmul {

inline constexpr int kThreads = 256;
inline constexpr int kSumColumns = 64;  // of a block
inline constexpr int kSumLanes = kThreads / (kSumColumns / 2);

struct GateArguments {
  const void* preactivation;
  void* output;
  int64_t rows, columns;  // of the output
  int64_t preactivation_stride, output_stride;
  bool is_packed;
  pointwise::Kind kind;
  float limit, slope;
};

struct SumArguments {
  const void* x;
  int64_t stride;
  const int32_t* ends;
  const int32_t* gather;  // null: as they lie
  const float* factors;   // null: ones
  void* output;
  int32_t rows, columns;
  bool is_float;  // the output, whatever x is
};

}  // namespace kernel_pytorch::grouped_matmul
