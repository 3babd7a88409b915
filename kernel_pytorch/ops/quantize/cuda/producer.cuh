// A thread's part of a tile that a producer computes from other tensors, each read once: norms, gates and their
// gradients. What is made is rounded to x's type and packed as if it had been read.
#pragma once

#include "kernel_pytorch/cuda/tile/reduce.cuh"
#include "kernel_pytorch/ops/engines/pointwise/cuda/math.cuh"
#include "kernel_pytorch/ops/quantize/cuda/tile.cuh"

namespace kernel_pytorch::quantize {

// The operands of one vector of a produced value.
template <class T, ProducerKind kProducer>
struct Parts {
  static constexpr int kCount = tile::Vector<T>::kCount;
  static constexpr bool kIsGate = kProducer.source == Source::kGate || kProducer.source == Source::kGateGradient;
  static constexpr bool kIsGradient = kProducer.source == Source::kGateGradient;
  tile::Vector<T> x, up, grad_output;
  float rstd;

  // `column` is x's.
  __device__ __forceinline__ void request(const Input& input, int32_t row, int32_t column) {
    const bool is_inside = row < input.rows && column < input.half;
    const auto load = [&](const void* data, int64_t row_stride) {
      return tile::load_once_if<T>(is_inside, static_cast<const T*>(data) + row * row_stride + column);
    };
    x = load(input.x, input.row_stride);
    if constexpr (kIsGate) up = load(input.up, input.up_stride);
    if constexpr (kIsGradient) grad_output = load(input.grad_output, input.grad_stride);
    if constexpr (kProducer.source == Source::kNorm) rstd = is_inside ? input.rstd[row] : 0.0f;
  }

  // `weights` are a norm's, of the vector's columns; `is_second`: of a gradient's two halves.
  __device__ __forceinline__ tile::Vector<T> make(const float* weights, bool is_second) const {
    constexpr bool kAccurate = pointwise::kIsAccurate<T>;
    float values[kCount];
    x.unpack(values);
    if constexpr (kProducer.source == Source::kNorm) {
#pragma unroll
      for (int j = 0; j < kCount; ++j) values[j] = values[j] * rstd * weights[j];
    } else {
      float factors[kCount];
      up.unpack(factors);
      if constexpr (kIsGradient) {
        float gradients[kCount];
        grad_output.unpack(gradients);
#pragma unroll
        for (int j = 0; j < kCount; ++j) {
          const pointwise::Values at = pointwise::differentiate<kProducer.kind, kAccurate>(values[j]);
          values[j] = is_second ? gradients[j] * at.value : at.derivative * factors[j] * gradients[j];
        }
      } else {
#pragma unroll
        for (int j = 0; j < kCount; ++j)
          values[j] = pointwise::function<kProducer.kind, kAccurate>(values[j]) * factors[j];
      }
    }
    return tile::Vector<T>::pack(values);
  }
};

// A norm's weights of a thread's columns.
template <class T>
__device__ __forceinline__ void load_weights(const Input& input, int32_t column, float (&weights)[kColumns]) {
  const bool is_inside = input.weight != nullptr && column < input.columns;
  const auto read = [&]<class W>(const W* data) {
    constexpr int kCount = tile::Vector<W>::kCount;
#pragma unroll
    for (int k = 0; k < kColumns / kCount; ++k) {
      float part[kCount];
      tile::load_shared_by_all_if<W>(is_inside, data + column + k * kCount).unpack(part);
#pragma unroll
      for (int j = 0; j < kCount; ++j) weights[k * kCount + j] = part[j];
    }
  };
  if (input.weight_is_float) {
    read(static_cast<const float*>(input.weight));
  } else {
    read(static_cast<const T*>(input.weight));
  }
  const float offset = input.weight == nullptr ? 1.0f : input.weight_offset;
#pragma unroll
  for (float& weight : weights) weight += offset;
}

template <class T, ProducerKind kProducer>
struct ProducedTile : ThreadTile<T, true> {
  using Base = ThreadTile<T, true>;
  using Base::kCount;
  using Base::kPerRow;
  static constexpr int kAtOnce = kProducer.source == Source::kGateGradient ? 2 : kRows;  // rows on their way

  __device__ __forceinline__ ProducedTile(const Input& input, int32_t row, int32_t column) {
    const bool is_second = kProducer.source == Source::kGateGradient && column >= input.half;
    const int32_t from = is_second ? column - static_cast<int32_t>(input.half) : column;
    float weights[kColumns] = {};
    if constexpr (kProducer.source == Source::kNorm) load_weights<T>(input, column, weights);
#pragma unroll
    for (int first = 0; first < kRows; first += kAtOnce) {
      Parts<T, kProducer> parts[kAtOnce][kPerRow];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
#pragma unroll
        for (int k = 0; k < kPerRow; ++k) parts[i][k].request(input, row + first + i, from + k * kCount);
      }
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
#pragma unroll
        for (int k = 0; k < kPerRow; ++k) {
          this->rows[first + i][k] = parts[i][k].make(weights + k * kCount, is_second);
        }
      }
    }
    this->pack_again();  // as if it had been read: what it was made from is not kept
    if (input.value != nullptr) store(input, row, column);
  }

 private:
  __device__ __forceinline__ void store(const Input& input, int32_t row, int32_t column) const {
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
#pragma unroll
      for (int k = 0; k < kPerRow; ++k) {
        const int32_t first = column + k * kCount;
        if (row + i < input.rows && first < input.columns) {
          tile::store<T>(static_cast<T*>(input.value) + (row + i) * input.columns + first, this->rows[i][k]);
        }
      }
    }
  }
};

template <class T, bool kVectors, ProducerKind kProducer>
struct TileChoice {
  static_assert(kVectors, "what is made comes in vectors");
  using Type = ProducedTile<T, kProducer>;
};
template <class T, bool kVectors, ProducerKind kProducer>
requires(kProducer.source == Source::kGiven) struct TileChoice<T, kVectors, kProducer> {
  using Type = ThreadTile<T, kVectors>;
};
template <class T, bool kVectors, ProducerKind kProducer>
using TileOf = typename TileChoice<T, kVectors, kProducer>::Type;

// One over the root of the mean square of every row, a block a row; with a residual also the sum, which is what counts.
template <class T>
__global__ void __launch_bounds__(kNormThreads) row_statistics(const __grid_constant__ NormArguments arguments) {
  using Sum = tile::BlockSum<kNormThreads / tile::kWarpLanes, 1>;
  constexpr int kCount = tile::Vector<T>::kCount;
  __shared__ typename Sum::Storage storage;
  const int64_t row = blockIdx.x;
  const T* x = static_cast<const T*>(arguments.x) + row * arguments.row_stride;
  const T* residual = static_cast<const T*>(arguments.residual) + row * arguments.residual_stride;
  float squares[1] = {0};
#pragma unroll 4
  for (int64_t column = threadIdx.x * kCount; column < arguments.columns; column += kNormThreads * kCount) {
    tile::Vector<T> vector = tile::load_once<T>(x + column);
    float values[kCount];
    vector.unpack(values);
    if (arguments.residual != nullptr) {
      float added[kCount];
      tile::load_once<T>(residual + column).unpack(added);
#pragma unroll
      for (int j = 0; j < kCount; ++j) values[j] += added[j];
      vector = tile::Vector<T>::pack(values);
      tile::store<T>(static_cast<T*>(arguments.sum) + row * arguments.columns + column, vector);
      vector.unpack(values);
    }
#pragma unroll
    for (float value : values) squares[0] += value * value;
  }
  Sum(storage).sum(squares);
  if (threadIdx.x == 0) {
    arguments.rstd[row] = rsqrtf(squares[0] / static_cast<float>(arguments.columns) + arguments.eps);
  }
}

}  // namespace kernel_pytorch::quantize
