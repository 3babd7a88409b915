// The gradient of gated pairs on the GPU, one pass over memory: where rows begin at multiples of 16 bytes a thread
// takes 16 bytes of pairs at a time. sm_80.
#pragma once

#include "kernel_pytorch/cuda/tile/vector.cuh"
#include "kernel_pytorch/ops/engines/pointwise/cuda/double_math.cuh"
#include "kernel_pytorch/ops/engines/pointwise/cuda/math.cuh"
#include "kernel_pytorch/ops/matmul/cuda/pairs_cuda.h"

namespace kernel_pytorch::matmul {

// kPairs at a time: the ones of 16 bytes, or 1.
template <class T, int kPairs>
__global__ void __launch_bounds__(kPairThreads) pair_gradient(const __grid_constant__ PairArguments arguments) {
  constexpr bool kAccurate = pointwise::kIsAccurate<T>;
  const int64_t per_row = arguments.columns / kPairs, count = arguments.rows * per_row;
  const int64_t step = static_cast<int64_t>(gridDim.x) * kPairThreads;
  for (int64_t index = static_cast<int64_t>(blockIdx.x) * kPairThreads + threadIdx.x; index < count; index += step) {
    const int64_t row = index / per_row, column = (index - row * per_row) * kPairs;
    const T* grad = static_cast<const T*>(arguments.grad_output) + row * arguments.grad_output_row + column;
    const T* saved = static_cast<const T*>(arguments.saved) + row * arguments.saved_row + 2 * column;
    T* target = static_cast<T*>(arguments.grad_input) + row * arguments.grad_input_row + 2 * column;
    float values[2 * kPairs];
    if constexpr (kPairs > 1) {
      tile::load_once<T>(saved).unpack(values);
    } else {
      values[0] = tile::to_float(saved[0]);
      values[1] = tile::to_float(saved[1]);
    }
    float gradients[kPairs];
#pragma unroll
    for (int i = 0; i < kPairs; ++i) gradients[i] = tile::to_float(grad[i]);
    pointwise::with_kind(arguments.kind, [&](auto constant) {
#pragma unroll
      for (int i = 0; i < kPairs; ++i) {
        const pointwise::Values gate = pointwise::differentiate<constant.value, kAccurate>(values[2 * i]);
        values[2 * i] = gradients[i] * values[2 * i + 1] * gate.derivative;
        values[2 * i + 1] = gradients[i] * gate.value;
      }
    });
    if constexpr (kPairs > 1) {
      tile::store(target, tile::Vector<T>::pack(values));
    } else {
      target[0] = tile::from_float<T>(values[0]);
      target[1] = tile::from_float<T>(values[1]);
    }
  }
}

// Of doubles.
__global__ void __launch_bounds__(kPairThreads) pair_gradient_double(const __grid_constant__ PairArguments arguments) {
  const int64_t count = arguments.rows * arguments.columns, step = static_cast<int64_t>(gridDim.x) * kPairThreads;
  for (int64_t index = static_cast<int64_t>(blockIdx.x) * kPairThreads + threadIdx.x; index < count; index += step) {
    const int64_t row = index / arguments.columns, column = index % arguments.columns;
    const double* saved = static_cast<const double*>(arguments.saved) + row * arguments.saved_row + 2 * column;
    double* target = static_cast<double*>(arguments.grad_input) + row * arguments.grad_input_row + 2 * column;
    const double gradient = static_cast<const double*>(arguments.grad_output)[row * arguments.grad_output_row + column];
    const double up = saved[1];
    const pointwise::DoubleValues gate = pointwise::differentiate(arguments.kind, saved[0]);
    target[0] = gradient * up * gate.derivative;
    target[1] = gradient * gate.value;
  }
}

}  // namespace kernel_pytorch::matmul
