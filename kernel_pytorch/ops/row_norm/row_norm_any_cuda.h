// Arguments of the row norms that take any strides, any alignment and any number of leading dimensions.
#pragma once

#include "kernel_pytorch/ops/any_rows_cuda.h"
#include "kernel_pytorch/ops/row_norm/row_norm_cuda.h"

namespace kernel_pytorch::row_norm {

struct AnyForwardArguments {
  AnyShape shape;
  AnyTensor x, residual;
  AnyTensor weight, bias;  // column stride only
  void* output;            // contiguous
  void* sum;
  float* mean;
  float* rstd;
  float eps;
  float weight_offset;
  bool centered;         // layer norm
  bool weight_is_float;  // weight and bias; otherwise of x's type
  Beside residual_type, output_type;
};

struct AnyBackwardArguments {
  AnyShape shape;
  AnyTensor grad_output, value, grad_sum;
  AnyTensor weight;
  const float* mean;
  const float* rstd;
  void* grad_input;  // contiguous
  float weight_offset;
  bool centered;
  bool weight_is_float;
  Beside grad_output_type;
};

struct AnyColumnSumArguments {
  AnyShape shape;
  AnyTensor grad_output, value;
  const float* mean;
  const float* rstd;
  float* weight_partial;  // [chunks, columns]; null: not wanted
  float* bias_partial;
  int64_t rows_per_chunk;
  bool centered;
  Beside grad_output_type;
};

inline constexpr int kColumnSumColumns = 32;  // a block sums this many columns
inline constexpr int kColumnSumRows = 8;      // of this many rows at a time

}  // namespace kernel_pytorch::row_norm
