// Arguments of the row norms that take any strides, any alignment and any number of leading dimensions.
#pragma once

#include "kernel_pytorch/ops/engines/row_norm/cuda/arguments_cuda.h"
#include "kernel_pytorch/ops/support/any_rows_cuda.h"

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
  MixedType residual_type, output_type;
  pointwise::Kind activation;  // of kernels that are compiled with one
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
  MixedType grad_output_type;
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
  MixedType grad_output_type;
};

inline constexpr int kColumnSumColumns = 32;  // a block sums this many columns
inline constexpr int kColumnSumRows = 8;      // of this many rows at a time

}  // namespace kernel_pytorch::row_norm
