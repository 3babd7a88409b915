// The gradients of one vector, and of all of them vector by vector. Sums over rows are in
// engines/pointwise/cuda/columns.cuh.
#pragma once

#include "kernel_pytorch/ops/engines/pointwise/cuda/vector.cuh"

namespace kernel_pytorch::pointwise {

// `gradient` is the output's, after dropout; `values` and `factors` are gate and up with their biases.
template <Kind kKind, bool kAccurate, bool kGated, int kCount>
__device__ __forceinline__ void differentiate_vector(const float (&gradient)[kCount], const float (&values)[kCount],
                                                     const float (&factors)[kCount], float (&grad_gate)[kCount],
                                                     float (&grad_up)[kCount]) {
#pragma unroll
  for (int j = 0; j < kCount; ++j) {
    if constexpr (kGated) {
      const Values at = differentiate<kKind, kAccurate>(values[j]);
      grad_up[j] = gradient[j] * at.value;
      grad_gate[j] = at.derivative * factors[j] * gradient[j];
    } else {
      grad_gate[j] = slope<kKind, kAccurate>(values[j]) * gradient[j];
    }
  }
}

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
    float gradient[kCount], values[kCount], factors[kCount];
    grad_output.unpack(gradient);
    gate.unpack(values);
    if constexpr (kGated) up.unpack(factors);
    if constexpr (kFused) {
      add_bias<T>(arguments.gate_bias, arguments.bias_is_float, column, values);
      if constexpr (kGated) add_bias<T>(arguments.up_bias, arguments.bias_is_float, column, factors);
      dropout.apply<kCount>(vector, gradient);
    }
    with_kind(arguments.kind, [&](auto constant) {
      differentiate_vector<constant.value, kIsAccurate<T>, kGated>(gradient, values, factors, grad_gate, grad_up);
    });
  }
};

template <class T, bool kGated, bool kFused, int kVectors>
__global__ void __launch_bounds__(kThreads) backward_vectors(const __grid_constant__ BackwardArguments arguments) {
  using Gradient = VectorGradient<T, kGated, kFused>;
  const VectorShape& shape = arguments.shape;
  const uint32_t threads = block_threads<kVectors>();
  const uint32_t first = blockIdx.x * (threads * kVectors) + threadIdx.x;
  VectorPlace places[kVectors];
  Gradient gradients[kVectors];
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    const uint32_t vector = first + i * threads;
    places[i] = place_of(shape, vector < shape.vectors ? vector : 0);
    gradients[i].request(arguments, places[i]);
  }
  const Dropout dropout(arguments.dropout);
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    const uint32_t vector = first + i * threads;
    float grad_gate[Gradient::kCount], grad_up[Gradient::kCount];
    gradients[i].compute(arguments, dropout, vector, places[i].column, grad_gate, grad_up);
    if (vector >= shape.vectors) continue;
    store<T>(arguments.grad_gate, places[i], grad_gate);
    if constexpr (kGated) store<T>(arguments.grad_up, places[i], grad_up);
  }
}

}  // namespace kernel_pytorch::pointwise
