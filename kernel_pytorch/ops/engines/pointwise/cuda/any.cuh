// The pointwise ops for whatever the vector kernels refuse: any strides, alignment, width and number of leading
// dimensions. One element per access: right first, fast second.
#pragma once

#include "kernel_pytorch/ops/engines/pointwise/cuda/vector.cuh"
#include "kernel_pytorch/ops/support/any_rows.cuh"

namespace kernel_pytorch::pointwise {

template <class T>
__device__ __forceinline__ float biased(const AnyRow<T>& row, const AnyTensor& bias, bool is_float, int64_t column) {
  return bias.data == nullptr ? row[column] : row[column] + parameter_at<T>(bias, is_float, column);
}

template <class T>
__global__ void __launch_bounds__(kThreads, 1) forward_any(const __grid_constant__ AnyForwardArguments arguments) {
  const AnyShape& shape = arguments.shape;
  const Dropout dropout(arguments.dropout);
  const int64_t elements = shape.rows * shape.columns;
  const int64_t step = static_cast<int64_t>(gridDim.x) * kThreads;
  for (int64_t element = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; element < elements;
       element += step) {
    const int64_t row = element / shape.columns, column = element - row * shape.columns;
    float values[1] = {biased<T>({arguments.gate, shape, row}, arguments.gate_bias, arguments.bias_is_float, column)};
    apply<kIsAccurate<T>>(arguments.kind, values);
    float value = values[0];
    if (arguments.up.data != nullptr) {
      value *= biased<T>({arguments.up, shape, row}, arguments.up_bias, arguments.bias_is_float, column);
    }
    value = dropout.apply_one(element, value);
    if (arguments.residual.data != nullptr) value += AnyRow<T>(arguments.residual, shape, row)[column];
    static_cast<T*>(arguments.output)[element] = tile::from_float<T>(value);
  }
}

template <class T>
__device__ __forceinline__ void store_any(const AnyTensor& tensor, const AnyShape& shape, int64_t row, int64_t column,
                                          float value) {
  T* start = static_cast<T*>(const_cast<void*>(tensor.data)) + any_row_offset(tensor, shape, row);
  start[column * tensor.column_stride] = tile::from_float<T>(value);
}

// Columns side by side, a range of rows for each block, so that the biases' gradients come out as partial rows.
template <class T>
__global__ void __launch_bounds__(kThreads, 1) backward_any(const __grid_constant__ AnyBackwardArguments arguments) {
  const AnyShape& shape = arguments.shape;
  const Dropout dropout(arguments.dropout);
  const int lane = threadIdx.x % kAnyColumns, strip = threadIdx.x / kAnyColumns;
  const int64_t column = static_cast<int64_t>(blockIdx.x) * kAnyColumns + lane;
  const int64_t first_row = blockIdx.y * arguments.rows_per_block;
  const int64_t end = min(first_row + arguments.rows_per_block, static_cast<long long>(shape.rows));
  float gate_sum = 0, up_sum = 0;
  for (int64_t row = first_row + strip; row < end && column < shape.columns; row += kAnyRows) {
    const float gradient =
        dropout.apply_one(row * shape.columns + column, AnyRow<T>(arguments.grad_output, shape, row)[column]);
    const float value = biased<T>({arguments.gate, shape, row}, arguments.gate_bias, arguments.bias_is_float, column);
    Values at;
    with_kind(arguments.kind, [&](auto constant) { at = differentiate<constant.value, kIsAccurate<T>>(value); });
    float grad_gate = gradient * at.derivative;
    if (arguments.up.data != nullptr) {
      grad_gate *= biased<T>({arguments.up, shape, row}, arguments.up_bias, arguments.bias_is_float, column);
      store_any<T>(arguments.grad_up, shape, row, column, gradient * at.value);
      up_sum += gradient * at.value;
    }
    store_any<T>(arguments.grad_gate, shape, row, column, grad_gate);
    gate_sum += grad_gate;
  }
  __shared__ float strips[2][kAnyRows][kAnyColumns];
  strips[0][strip][lane] = gate_sum;
  strips[1][strip][lane] = up_sum;
  __syncthreads();
  float* partial = strip == 0 ? arguments.gate_partial : arguments.up_partial;
  if (strip >= 2 || column >= shape.columns || partial == nullptr) return;
  float total = 0;
  for (int other = 0; other < kAnyRows; ++other) total += strips[strip][other][lane];
  partial[blockIdx.y * shape.columns + column] = total;
}

}  // namespace kernel_pytorch::pointwise
