// The gate of rows that a product left: for products whose kernel has no such epilogue. sm_80.
#pragma once

#include "kernel_pytorch/cuda/tile/element.cuh"
#include "kernel_pytorch/ops/engines/pointwise/cuda/math.cuh"
#include "kernel_pytorch/ops/grouped_matmul/cuda/arguments_cuda.h"

namespace kernel_pytorch::grouped_matmul {

template <class T>
__global__ void __launch_bounds__(kThreads) gate(const __grid_constant__ GateArguments arguments) {
  const int64_t index = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (index >= arguments.rows * arguments.columns) return;
  const int64_t row = index / arguments.columns, column = index - row * arguments.columns;
  const T* from = static_cast<const T*>(arguments.preactivation) + row * arguments.preactivation_stride;
  float gate[1] = {tile::to_float(from[arguments.is_packed ? column : 2 * column])};
  float up = tile::to_float(from[arguments.is_packed ? arguments.columns + column : 2 * column + 1]);
  if (arguments.limit > 0.0f) {
    gate[0] = fminf(gate[0], arguments.limit);
    gate[0] *= pointwise::sigmoid<true>(arguments.slope * gate[0]);
    up = fminf(fmaxf(up, -arguments.limit), arguments.limit) + 1.0f;
  } else {
    pointwise::apply<true>(arguments.kind, gate);
  }
  static_cast<T*>(arguments.output)[row * arguments.output_stride + column] = tile::from_float<T>(gate[0] * up);
}

}  // namespace kernel_pytorch::grouped_matmul
