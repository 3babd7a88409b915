// What host and device agree on for the combination and the activation's gradient on CUDA.
#pragma once

#include "kernel_pytorch/base/fixed_width.h"
#include "kernel_pytorch/ops/engines/pointwise/kind_cuda.h"

namespace kernel_pytorch::moe_mlp {

inline constexpr int kThreads = 256;
inline constexpr int kMostRows = 16;  // of a token

// A block has a token.
struct CombineArguments {
  const void* y;
  int64_t y_stride;
  const int32_t* row_of_token;
  const float* weights;  // null: ones
  void* output;
  int32_t k, columns;
};

// A warp has a pair.
struct CombineBackwardArguments {
  const void* grad_output;
  const void* y;
  int64_t grad_stride, y_stride;
  const int32_t* row_of_token;
  const float* weights;  // null: ones
  void* grad_y;          // null: not wanted; zeros before
  float* grad_weights;   // null: not wanted
  int32_t pairs, k, columns;
};

struct ActivationArguments {
  const void* grad_hidden;
  const void* preactivation;
  int64_t grad_stride, preactivation_stride;
  const int32_t* row_of_token;
  const float* weights;
  const void* grad_output;  // with the next two
  const void* down_bias;    // null: none
  const int32_t* experts;
  int64_t output_stride, bias_stride;
  int32_t pairs, k, inner, columns;
  bool is_gated, is_packed, is_float_bias;
  pointwise::Kind kind;
  float limit, slope;
  void* grad_preactivation;
  void* hidden;
  int64_t grad_preactivation_stride, hidden_stride;
  float* row_weights;  // null: not wanted
  float* grad_weights;
};

}  // namespace kernel_pytorch::moe_mlp
