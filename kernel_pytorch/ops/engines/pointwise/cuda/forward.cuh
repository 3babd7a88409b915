// output = dropout(function(gate + bias) [* (up + bias)]) + residual, vector by vector. kGated reads `up`; kFused
// allows biases, dropout and a residual, which the plain kernel's registers know nothing of.
#pragma once

#include "kernel_pytorch/ops/engines/pointwise/cuda/vector.cuh"

namespace kernel_pytorch::pointwise {

template <class T, bool kGated, bool kFused, int kVectors>
__global__ void __launch_bounds__(kThreads) forward_vectors(const __grid_constant__ ForwardArguments arguments) {
  constexpr int kCount = tile::Vector<T>::kCount;
  const VectorShape& shape = arguments.shape;
  const uint32_t threads = block_threads<kVectors>();
  const uint32_t first = blockIdx.x * (threads * kVectors) + threadIdx.x;
  VectorPlace places[kVectors];
  tile::Vector<T> gate[kVectors], up[kVectors], residual[kVectors];
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    const uint32_t vector = first + i * threads;
    places[i] = place_of(shape, vector < shape.vectors ? vector : 0);
    gate[i] = load<T>(arguments.gate, places[i]);
    if constexpr (kGated) up[i] = load<T>(arguments.up, places[i]);
    if constexpr (kFused) {
      if (arguments.residual.data != nullptr) residual[i] = load<T>(arguments.residual, places[i]);
    }
  }
  const Dropout dropout(arguments.dropout);
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    const uint32_t vector = first + i * threads;
    float values[kCount], factors[kCount];
    gate[i].unpack(values);
    if constexpr (kFused) add_bias<T>(arguments.gate_bias, arguments.bias_is_float, places[i].column, values);
    apply<kIsAccurate<T>>(arguments.kind, values);
    if constexpr (kGated) {
      up[i].unpack(factors);
      if constexpr (kFused) add_bias<T>(arguments.up_bias, arguments.bias_is_float, places[i].column, factors);
#pragma unroll
      for (int j = 0; j < kCount; ++j) values[j] *= factors[j];
    }
    if constexpr (kFused) {
      dropout.apply<kCount>(vector, values);
      if (arguments.residual.data != nullptr) {
        float added[kCount];
        residual[i].unpack(added);
#pragma unroll
        for (int j = 0; j < kCount; ++j) values[j] += added[j];
      }
    }
    if (vector < shape.vectors) store<T>(arguments.output, places[i], values);
  }
}

}  // namespace kernel_pytorch::pointwise
