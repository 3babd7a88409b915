// The pointwise ops on fp64 tensors of any strides, in fp64: one element per access, right first. Where gradients of
// biases are wanted a block adds up all rows of its columns.
#pragma once

#include "kernel_pytorch/ops/engines/pointwise/cuda/double_cuda.h"
#include "kernel_pytorch/ops/engines/pointwise/cuda/double_math.cuh"
#include "kernel_pytorch/ops/engines/pointwise/cuda/vector.cuh"
#include "kernel_pytorch/ops/support/any_rows.cuh"

namespace kernel_pytorch::pointwise {

__device__ __forceinline__ double* double_at(const AnyTensor& tensor, const AnyShape& shape, int64_t row,
                                             int64_t column) {
  double* data = static_cast<double*>(const_cast<void*>(tensor.data));
  return data + any_row_offset(tensor, shape, row) + column * tensor.column_stride;
}

__device__ __forceinline__ double biased_double(const AnyTensor& tensor, const AnyTensor& bias, const AnyShape& shape,
                                                int64_t row, int64_t column) {
  const double value = *double_at(tensor, shape, row, column);
  if (bias.data == nullptr) return value;
  return value + static_cast<const double*>(bias.data)[column * bias.column_stride];
}

// A dropped value is 0 also where it is not finite.
__device__ __forceinline__ double drop_double(const Dropout& dropout, int64_t element, double value) {
  const float factor = dropout.apply_one(element, 1.0f);
  return factor == 0.0f ? 0.0 : value * static_cast<double>(factor);
}

__global__ void __launch_bounds__(kThreads) forward_double(const __grid_constant__ AnyForwardArguments arguments) {
  const AnyShape& shape = arguments.shape;
  const Dropout dropout(arguments.dropout);
  const int64_t elements = shape.rows * shape.columns, step = static_cast<int64_t>(gridDim.x) * kThreads;
  for (int64_t element = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; element < elements;
       element += step) {
    const int64_t row = element / shape.columns, column = element - row * shape.columns;
    double value =
        differentiate(arguments.kind, biased_double(arguments.gate, arguments.gate_bias, shape, row, column)).value;
    if (arguments.up.data != nullptr) value *= biased_double(arguments.up, arguments.up_bias, shape, row, column);
    value = drop_double(dropout, element, value);
    if (arguments.residual.data != nullptr) value += *double_at(arguments.residual, shape, row, column);
    static_cast<double*>(arguments.output)[element] = value;
  }
}

__global__ void __launch_bounds__(kThreads) backward_double(const __grid_constant__ DoubleBackwardArguments arguments) {
  const AnyBackwardArguments& rows = arguments.rows;
  const AnyShape& shape = rows.shape;
  const Dropout dropout(rows.dropout);
  const int lane = threadIdx.x % kAnyColumns, strip = threadIdx.x / kAnyColumns;
  const int64_t column = static_cast<int64_t>(blockIdx.x) * kAnyColumns + lane;
  const int64_t first_row = blockIdx.y * rows.rows_per_block;
  const int64_t end = min(first_row + rows.rows_per_block, static_cast<long long>(shape.rows));
  double gate_sum = 0, up_sum = 0;
  for (int64_t row = first_row + strip; row < end && column < shape.columns; row += kAnyRows) {
    const double gradient =
        drop_double(dropout, row * shape.columns + column, *double_at(rows.grad_output, shape, row, column));
    const DoubleValues at = differentiate(rows.kind, biased_double(rows.gate, rows.gate_bias, shape, row, column));
    double grad_gate = gradient * at.derivative;
    if (rows.up.data != nullptr) {
      grad_gate *= biased_double(rows.up, rows.up_bias, shape, row, column);
      *double_at(rows.grad_up, shape, row, column) = gradient * at.value;
      up_sum += gradient * at.value;
    }
    *double_at(rows.grad_gate, shape, row, column) = grad_gate;
    gate_sum += grad_gate;
  }
  __shared__ double strips[2][kAnyRows][kAnyColumns];
  strips[0][strip][lane] = gate_sum;
  strips[1][strip][lane] = up_sum;
  __syncthreads();
  const AnyTensor& total = strip == 0 ? arguments.grad_gate_bias : arguments.grad_up_bias;
  if (strip >= 2 || column >= shape.columns || total.data == nullptr) return;
  double sum = 0;
  for (int other = 0; other < kAnyRows; ++other) sum += strips[strip][other][lane];
  static_cast<double*>(const_cast<void*>(total.data))[column * total.column_stride] = sum;
}

}  // namespace kernel_pytorch::pointwise
