// Rows of the mixture: weighted sums of a token's rows, their gradient, and the activation's gradient. All of them are
// bound by memory; 16 bytes per lane where rows allow it. sm_80.
#pragma once

#include "kernel_pytorch/cuda/tile/dependent_launch.cuh"
#include "kernel_pytorch/cuda/tile/reduce.cuh"
#include "kernel_pytorch/cuda/tile/vector.cuh"
#include "kernel_pytorch/ops/engines/pointwise/cuda/math.cuh"
#include "kernel_pytorch/ops/moe_mlp/cuda/arguments_cuda.h"

namespace kernel_pytorch::moe_mlp {

// kCount neighbouring elements of a row as floats: a vector, or one.
template <class T, bool kVectors>
struct Piece {
  static constexpr int kCount = kVectors ? tile::Vector<T>::kCount : 1;

  static __device__ __forceinline__ void load(const T* from, float (&values)[kCount]) {
    if constexpr (kVectors) {
      tile::load_once<T>(from).unpack(values);
    } else {
      values[0] = tile::to_float(*from);
    }
  }
  static __device__ __forceinline__ void store(T* to, const float (&values)[kCount]) {
    if constexpr (kVectors) {
      tile::store(to, tile::Vector<T>::pack(values));
    } else {
      *to = tile::from_float<T>(values[0]);
    }
  }
};

template <class T, bool kVectors>
__global__ void __launch_bounds__(kThreads) combine(const __grid_constant__ CombineArguments arguments) {
  using P = Piece<T, kVectors>;
  __shared__ const T* rows[kMostRows];
  __shared__ float factors[kMostRows];
  const int64_t token = blockIdx.x;
  const int32_t thread = static_cast<int32_t>(threadIdx.x);
  tile::follow_closely();
  if (thread < arguments.k) {
    const int64_t pair = token * arguments.k + thread;
    const int32_t row = arguments.row_of_token[pair];
    rows[thread] = row < 0 ? nullptr : static_cast<const T*>(arguments.y) + row * arguments.y_stride;
    factors[thread] = arguments.weights == nullptr ? 1.0f : arguments.weights[pair];
  }
  __syncthreads();
  T* to = static_cast<T*>(arguments.output) + token * arguments.columns;
  for (int32_t column = thread * P::kCount; column < arguments.columns; column += kThreads * P::kCount) {
    float sums[P::kCount] = {};
#pragma unroll 4
    for (int32_t j = 0; j < arguments.k; ++j) {
      if (rows[j] == nullptr) continue;
      float values[P::kCount];
      P::load(rows[j] + column, values);
#pragma unroll
      for (int i = 0; i < P::kCount; ++i) sums[i] = fmaf(factors[j], values[i], sums[i]);
    }
    P::store(to + column, sums);
  }
}

template <class T, bool kVectors>
__global__ void __launch_bounds__(kThreads)
    combine_backward(const __grid_constant__ CombineBackwardArguments arguments) {
  using P = Piece<T, kVectors>;
  const int64_t pair = (int64_t{blockIdx.x} * kThreads + threadIdx.x) / 32;
  const int32_t lane = static_cast<int32_t>(threadIdx.x % 32);
  tile::follow_closely();
  if (pair >= arguments.pairs) return;
  const int32_t row = arguments.row_of_token[pair];
  float product = 0.0f;
  if (row >= 0) {
    const float weight = arguments.weights == nullptr ? 1.0f : arguments.weights[pair];
    const T* gradient = static_cast<const T*>(arguments.grad_output) + pair / arguments.k * arguments.grad_stride;
    const T* y = static_cast<const T*>(arguments.y) + row * arguments.y_stride;
    T* to = static_cast<T*>(arguments.grad_y) + int64_t{row} * arguments.columns;
    for (int32_t column = lane * P::kCount; column < arguments.columns; column += 32 * P::kCount) {
      float values[P::kCount];
      P::load(gradient + column, values);
      if (arguments.grad_weights != nullptr) {
        float others[P::kCount];
        P::load(y + column, others);
#pragma unroll
        for (int i = 0; i < P::kCount; ++i) product = fmaf(values[i], others[i], product);
      }
      if (arguments.grad_y != nullptr) {
#pragma unroll
        for (int i = 0; i < P::kCount; ++i) values[i] *= weight;
        P::store(to + column, values);
      }
    }
  }
  product = tile::sum_lanes<32>(product);
  if (arguments.grad_weights != nullptr && lane == 0) arguments.grad_weights[pair] = product;
}

// Gates and ups at a column of the activation.
template <class T, bool kVectors>
struct Pairs {
  using P = Piece<T, kVectors>;
  float gates[P::kCount], ups[P::kCount];

  __device__ __forceinline__ void load(const ActivationArguments& arguments, const T* row, int32_t column) {
    if (!arguments.is_gated || arguments.is_packed) {
      P::load(row + column, gates);
      if (arguments.is_gated) P::load(row + arguments.inner + column, ups);
    } else if constexpr (kVectors) {
      float low[P::kCount], high[P::kCount];
      P::load(row + 2 * column, low);
      P::load(row + 2 * column + P::kCount, high);
#pragma unroll
      for (int i = 0; i < P::kCount / 2; ++i) {
        gates[i] = low[2 * i], ups[i] = low[2 * i + 1];
        gates[P::kCount / 2 + i] = high[2 * i], ups[P::kCount / 2 + i] = high[2 * i + 1];
      }
    } else {
      gates[0] = tile::to_float(row[2 * column]), ups[0] = tile::to_float(row[2 * column + 1]);
    }
  }
  __device__ __forceinline__ void store(const ActivationArguments& arguments, T* row, int32_t column) const {
    if (!arguments.is_gated || arguments.is_packed) {
      P::store(row + column, gates);
      if (arguments.is_gated) P::store(row + arguments.inner + column, ups);
    } else if constexpr (kVectors) {
      float low[P::kCount], high[P::kCount];
#pragma unroll
      for (int i = 0; i < P::kCount / 2; ++i) {
        low[2 * i] = gates[i], low[2 * i + 1] = ups[i];
        high[2 * i] = gates[P::kCount / 2 + i], high[2 * i + 1] = ups[P::kCount / 2 + i];
      }
      P::store(row + 2 * column, low);
      P::store(row + 2 * column + P::kCount, high);
    } else {
      row[2 * column] = tile::from_float<T>(gates[0]), row[2 * column + 1] = tile::from_float<T>(ups[0]);
    }
  }
};

// The gate's value, and with the gradient of the product the gradients of gate and up, in their places.
template <pointwise::Kind kKind, bool kAccurate>
__device__ __forceinline__ float differentiate_gate(const ActivationArguments& arguments, float gradient, float& gate,
                                                    float& up) {
  if (arguments.limit > 0.0f) {
    const float limit = arguments.limit, g = fminf(gate, limit), factor = fminf(fmaxf(up, -limit), limit) + 1.0f;
    const float s = pointwise::sigmoid<kAccurate>(arguments.slope * g);
    gate = gate <= limit ? gradient * factor * (s + arguments.slope * g * s * (1.0f - s)) : 0.0f;
    up = fabsf(up) <= limit ? gradient * g * s : 0.0f;
    return g * s * factor;
  }
  const pointwise::Values at = pointwise::differentiate<kKind, kAccurate>(gate);
  const float factor = arguments.is_gated ? up : 1.0f;
  gate = gradient * factor * at.derivative;
  up = gradient * at.value;
  return at.value * factor;
}

template <class T, bool kVectors, pointwise::Kind kKind>
__device__ __forceinline__ float activate_row(const ActivationArguments& arguments, int64_t row, float weight) {
  using P = Piece<T, kVectors>;
  const int32_t lane = static_cast<int32_t>(threadIdx.x % 32);
  const T* gradient = static_cast<const T*>(arguments.grad_hidden) + row * arguments.grad_stride;
  const T* preactivation = static_cast<const T*>(arguments.preactivation) + row * arguments.preactivation_stride;
  T* grad_preactivation = static_cast<T*>(arguments.grad_preactivation) + row * arguments.grad_preactivation_stride;
  T* hidden = static_cast<T*>(arguments.hidden) + row * arguments.hidden_stride;
  float product = 0.0f;
  for (int32_t column = lane * P::kCount; column < arguments.inner; column += 32 * P::kCount) {
    float gradients[P::kCount], results[P::kCount];
    Pairs<T, kVectors> pairs;
    P::load(gradient + column, gradients);
    pairs.load(arguments, preactivation, column);
#pragma unroll
    for (int i = 0; i < P::kCount; ++i) {
      const float result =
          differentiate_gate<kKind, sizeof(T) == 4>(arguments, weight * gradients[i], pairs.gates[i], pairs.ups[i]);
      product = fmaf(gradients[i], result, product);
      results[i] = weight * result;
    }
    pairs.store(arguments, grad_preactivation, column);
    P::store(hidden + column, results);
  }
  return product;
}

template <class T>
__device__ __forceinline__ float bias_product(const ActivationArguments& arguments, int64_t pair) {
  const int32_t lane = static_cast<int32_t>(threadIdx.x % 32);
  const T* gradient = static_cast<const T*>(arguments.grad_output) + pair / arguments.k * arguments.output_stride;
  const int64_t first = arguments.experts[pair] * arguments.bias_stride;
  float product = 0.0f;
  for (int32_t column = lane; column < arguments.columns; column += 32) {
    const float bias = arguments.is_float_bias
                           ? static_cast<const float*>(arguments.down_bias)[first + column]
                           : tile::to_float(static_cast<const T*>(arguments.down_bias)[first + column]);
    product = fmaf(tile::to_float(gradient[column]), bias, product);
  }
  return product;
}

template <class T, bool kVectors>
__global__ void __launch_bounds__(kThreads) activation_backward(const __grid_constant__ ActivationArguments arguments) {
  const int64_t pair = (int64_t{blockIdx.x} * kThreads + threadIdx.x) / 32;
  tile::follow_closely();
  if (pair >= arguments.pairs) return;
  const int32_t row = arguments.row_of_token[pair];
  float product = 0.0f;
  if (row >= 0) {
    const float weight = arguments.weights[pair];
    pointwise::with_kind(arguments.kind, [&](auto constant) {
      product = activate_row<T, kVectors, constant.value>(arguments, row, weight);
    });
    if (arguments.down_bias != nullptr) product += bias_product<T>(arguments, pair);
    if (arguments.row_weights != nullptr && threadIdx.x % 32 == 0) arguments.row_weights[row] = weight;
  }
  product = tile::sum_lanes<32>(product);
  if (threadIdx.x % 32 == 0) arguments.grad_weights[pair] = product;
}

}  // namespace kernel_pytorch::moe_mlp
