// The gradients of one vector, and two ways over all of them: vector by vector (backward_vectors), or in tiles of
// columns over many rows (backward_columns), which leave the biases' gradients as one partial row a block.
#pragma once

#include "kernel_pytorch/ops/pointwise/pointwise_vector_cuda.cuh"

namespace kernel_pytorch::pointwise {

template <class T, bool kGated, bool kFused>
struct VectorGradient {
  static constexpr int kCount = tile::Vector<T>::kCount;
  tile::Vector<T> grad_output, gate, up;

  __device__ __forceinline__ void request(const BackwardArguments& arguments, const VectorPlace& place) {
    grad_output = load<T>(arguments.grad_output, place);
    gate = load<T>(arguments.gate, place);
    if constexpr (kGated) up = load<T>(arguments.up, place);
  }

  // The gradients of gate and up, whose first vector in the contiguous output is `vector`.
  __device__ __forceinline__ void compute(const BackwardArguments& arguments, const Dropout& dropout, uint64_t vector,
                                          uint32_t column, float (&grad_gate)[kCount], float (&grad_up)[kCount]) const {
    float gradient[kCount], values[kCount];
    grad_output.unpack(gradient);
    gate.unpack(values);
    if constexpr (kFused) {
      add_bias<T>(arguments.gate_bias, arguments.bias_is_float, column, values);
      dropout.apply<kCount>(vector, gradient);
    }
    differentiate_all<kIsAccurate<T>>(arguments.kind, values, grad_gate);
    if constexpr (kGated) {
      float factors[kCount];
      up.unpack(factors);
      if constexpr (kFused) add_bias<T>(arguments.up_bias, arguments.bias_is_float, column, factors);
#pragma unroll
      for (int j = 0; j < kCount; ++j) {
        grad_up[j] = gradient[j] * values[j];
        grad_gate[j] *= factors[j];
      }
    }
#pragma unroll
    for (int j = 0; j < kCount; ++j) grad_gate[j] *= gradient[j];
  }
};

template <class T, bool kGated, bool kFused, int kVectors>
__global__ void __launch_bounds__(kThreads) backward_vectors(const __grid_constant__ BackwardArguments arguments) {
  using Gradient = VectorGradient<T, kGated, kFused>;
  const VectorShape& shape = arguments.shape;
  const uint32_t first = blockIdx.x * (kThreads * kVectors) + threadIdx.x;
  VectorPlace places[kVectors];
  Gradient gradients[kVectors];
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    const uint32_t vector = first + i * kThreads;
    places[i] = place_of(shape, vector < shape.vectors ? vector : 0);
    gradients[i].request(arguments, places[i]);
  }
  const Dropout dropout(arguments.dropout);
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    const uint32_t vector = first + i * kThreads;
    float grad_gate[Gradient::kCount], grad_up[Gradient::kCount];
    gradients[i].compute(arguments, dropout, vector, places[i].column, grad_gate, grad_up);
    if (vector >= shape.vectors) continue;
    store<T>(arguments.grad_gate, places[i], grad_gate);
    if constexpr (kGated) store<T>(arguments.grad_up, places[i], grad_up);
  }
}

// Blocks of backward_columns that a multiprocessor holds: without the bound, what never changes over the rows takes the
// registers.
template <bool kGated>
inline constexpr int kColumnBlocks = kGated ? 2 : 3;

// Adds the tile's rows in order and writes the block's partial row. All threads of the block call it.
template <int kCount>
__device__ __forceinline__ void store_partial(float* partial, int64_t columns, uint32_t column,
                                              const float (&sums)[kCount]) {
  __shared__ float strips[kTileRows][kTileVectors][kCount];
  const int lane = threadIdx.x % kTileVectors, strip = threadIdx.x / kTileVectors;
  __syncthreads();  // the one before may still be read
#pragma unroll
  for (int j = 0; j < kCount; ++j) strips[strip][lane][j] = sums[j];
  __syncthreads();
  const uint32_t first_column = (column - lane) * kCount;
  for (int i = threadIdx.x; i < kTileVectors * kCount; i += kThreads) {
    float total = 0;
    for (int other = 0; other < kTileRows; ++other) total += strips[other][i / kCount][i % kCount];
    if (first_column + i < columns) partial[blockIdx.y * columns + first_column + i] = total;
  }
}

template <class T, bool kGated, int kVectors>
__global__ void __launch_bounds__(kThreads, kColumnBlocks<kGated>)
    backward_columns(const __grid_constant__ BackwardArguments arguments) {
  using Gradient = VectorGradient<T, kGated, true>;
  constexpr int kCount = Gradient::kCount;
  const VectorShape& shape = arguments.shape;
  const uint32_t column = blockIdx.x * kTileVectors + threadIdx.x % kTileVectors;
  const bool is_inside = column < shape.row_vectors.divisor;
  const int64_t first_row = static_cast<int64_t>(blockIdx.y) * arguments.rows_per_block;
  const int64_t end = min(first_row + arguments.rows_per_block, static_cast<long long>(shape.rows));
  float gate_sums[kCount] = {}, up_sums[kCount] = {};
  for (int64_t row = first_row + threadIdx.x / kTileVectors; row < end; row += kTileRows * kVectors) {
    Gradient gradients[kVectors];
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      const int64_t own = row + i * kTileRows;
      gradients[i].request(arguments, {own < end ? own : first_row, is_inside ? column : 0});
    }
    const Dropout dropout = Dropout::reread(arguments.dropout);
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      const int64_t own = row + i * kTileRows;
      if (own >= end || !is_inside) continue;
      float grad_gate[kCount], grad_up[kCount];
      const uint64_t vector = static_cast<uint64_t>(own) * shape.row_vectors.divisor + column;
      gradients[i].compute(arguments, dropout, vector, column, grad_gate, grad_up);
      store<T>(arguments.grad_gate, {own, column}, grad_gate);
      if constexpr (kGated) store<T>(arguments.grad_up, {own, column}, grad_up);
#pragma unroll
      for (int j = 0; j < kCount; ++j) {
        gate_sums[j] += grad_gate[j];
        if constexpr (kGated) up_sums[j] += grad_up[j];
      }
    }
  }
  const int64_t columns = static_cast<int64_t>(shape.row_vectors.divisor) * kCount;
  if (arguments.gate_partial != nullptr) store_partial(arguments.gate_partial, columns, column, gate_sums);
  if constexpr (kGated) {
    if (arguments.up_partial != nullptr) store_partial(arguments.up_partial, columns, column, up_sums);
  }
}

}  // namespace kernel_pytorch::pointwise
