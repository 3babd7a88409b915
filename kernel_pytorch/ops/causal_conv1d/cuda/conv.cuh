// The causal convolution: a thread takes one channel and goes through some neighbouring tokens, so that a warp reads
// rows of neighbouring channels. Inputs of a window are read again for every token, from the first level of cache.
#pragma once

#include "kernel_pytorch/cuda/tile/element.cuh"
#include "kernel_pytorch/ops/causal_conv1d/cuda/conv_cuda.h"
#include "kernel_pytorch/ops/support/indices_cuda.h"

namespace kernel_pytorch::causal_conv1d {

// A sequence's tokens. Wrong offsets read no foreign memory.
struct Sequence {
  int64_t index, begin, end;
};
__device__ __forceinline__ int64_t offset_at(const ConvArguments& arguments, int64_t i) {
  const int64_t offset = index_at(arguments.offsets, arguments.offsets_are_wide, i);
  return offset < 0 ? 0 : offset > arguments.tokens ? arguments.tokens : offset;
}
__device__ __forceinline__ Sequence sequence_at(const ConvArguments& arguments, int64_t index) {
  if (arguments.offsets == nullptr) return {index, 0, arguments.tokens};
  const int64_t begin = offset_at(arguments, index), end = offset_at(arguments, index + 1);
  return {index, begin, end > begin ? end : begin};
}
// The sequence that has a token: the last that begins at or in front of it.
__device__ __forceinline__ Sequence sequence_of(const ConvArguments& arguments, int64_t batch, int64_t token) {
  if (arguments.offsets == nullptr) return sequence_at(arguments, batch);
  int64_t low = 0, high = arguments.sequences;
  while (high - low > 1) {
    const int64_t middle = (low + high) / 2;
    if (offset_at(arguments, middle) <= token) {
      low = middle;
    } else {
      high = middle;
    }
  }
  return arguments.sequences == 0 ? Sequence{0, 0, 0} : sequence_at(arguments, low);
}

// One channel of one sequence.
template <class T, int kWidth>
struct Channel {
  const ConvArguments& arguments;
  int64_t batch, channel;
  Sequence sequence;
  float weight[kWidth], bias;

  __device__ __forceinline__ Channel(const ConvArguments& all, int64_t of_batch, int64_t of_channel)
      : arguments(all), batch(of_batch), channel(of_channel), sequence{}, bias(0) {
    const T* taps = static_cast<const T*>(all.weight) + channel * kWidth;
#pragma unroll
    for (int i = 0; i < kWidth; ++i) weight[i] = tile::to_float<T>(taps[i]);
    if (all.bias != nullptr) bias = tile::to_float<T>(static_cast<const T*>(all.bias)[channel]);
  }
  __device__ __forceinline__ float state(const void* states, int64_t row) const {
    if (states == nullptr) return 0;
    const int64_t at = (sequence.index * (kWidth - 1) + row) * arguments.channels + channel;
    return tile::to_float<T>(static_cast<const T*>(states)[at]);
  }
  // The input of a token, which may stand in front of the sequence.
  __device__ __forceinline__ float input(int64_t token) const {
    if (token < sequence.begin) return state(arguments.initial, token - sequence.begin + kWidth - 1);
    const int64_t at = batch * arguments.x_batch_stride + token * arguments.x_stride + channel;
    return tile::to_float<T>(static_cast<const T*>(arguments.x)[at]);
  }
  __device__ __forceinline__ float sum(int64_t token) const {
    float sum = bias;
#pragma unroll
    for (int i = 0; i < kWidth; ++i) sum += weight[i] * input(token - kWidth + 1 + i);
    return sum;
  }
  // The gradient of a token's sum; 0 of a token of another sequence.
  __device__ __forceinline__ float grad_sum(int64_t token) const {
    if (token < sequence.begin || token >= sequence.end) return 0;
    const int64_t at = batch * arguments.grad_batch_stride + token * arguments.grad_stride + channel;
    const float gradient = tile::to_float<T>(static_cast<const T*>(arguments.grad_output)[at]);
    if (!arguments.silu) return gradient;
    const float value = sum(token), sigmoid = 1.0f / (1.0f + expf(-value));
    return gradient * sigmoid * (1.0f + value * (1.0f - sigmoid));
  }
  // Of the input of a token: `sums` are the gradients of the sums of it and the next tokens.
  __device__ __forceinline__ float grad_input(int64_t token, const float (&sums)[kWidth]) const {
    const int64_t kept = token - sequence.end + kWidth - 1;
    float gradient = kept >= 0 ? state(arguments.grad_final, kept) : 0.0f;
#pragma unroll
    for (int i = 0; i < kWidth; ++i) gradient += weight[kWidth - 1 - i] * sums[i];
    return gradient;
  }
  __device__ __forceinline__ void write(void* to, int64_t token, float value) const {
    const int64_t at = (batch * arguments.tokens + token) * arguments.channels + channel;
    static_cast<T*>(to)[at] = tile::from_float<T>(value);
  }
};

template <class T, int kWidth>
__global__ void __launch_bounds__(kThreads) convolve(const __grid_constant__ ConvArguments arguments) {
  const int64_t channel = static_cast<int64_t>(blockIdx.y) * kThreads + threadIdx.x;
  if (channel >= arguments.channels) return;
  const int64_t batch = blockIdx.x / arguments.parts;
  int64_t token = blockIdx.x % arguments.parts * kPartTokens;
  const int64_t last = token + kPartTokens < arguments.tokens ? token + kPartTokens : arguments.tokens;
  Channel<T, kWidth> one(arguments, batch, channel);
  one.sequence = sequence_of(arguments, batch, token);
  for (; token < last; ++token) {
    if (token >= one.sequence.end) one.sequence = sequence_of(arguments, batch, token);
    float result = 0;
    if (token < one.sequence.end) {
      const float sum = one.sum(token);
      result = arguments.silu ? sum / (1.0f + expf(-sum)) : sum;
    }
    one.write(arguments.output, token, result);
  }
}

// The last inputs of each sequence. Ascending: in place nothing is read that was written.
template <class T, int kWidth>
__global__ void __launch_bounds__(kThreads) keep_inputs(const __grid_constant__ ConvArguments arguments) {
  const int64_t channel = static_cast<int64_t>(blockIdx.y) * kThreads + threadIdx.x;
  if (channel >= arguments.channels) return;
  const int64_t sequence = blockIdx.x;
  Channel<T, kWidth> one(arguments, arguments.offsets == nullptr ? sequence : 0, channel);
  one.sequence = sequence_at(arguments, sequence);
  for (int i = 0; i + 1 < kWidth; ++i) {
    const float input = one.input(one.sequence.end - kWidth + 1 + i);
    const int64_t at = (sequence * (kWidth - 1) + i) * arguments.channels + channel;
    static_cast<T*>(arguments.final)[at] = tile::from_float<T>(input);
  }
}

// Gradients of x, and a part's share of those of weight and bias.
template <class T, int kWidth>
__global__ void __launch_bounds__(kThreads) differentiate(const __grid_constant__ ConvArguments arguments) {
  const int64_t channel = static_cast<int64_t>(blockIdx.y) * kThreads + threadIdx.x;
  if (channel >= arguments.channels) return;
  const int64_t batch = blockIdx.x / arguments.parts;
  int64_t token = blockIdx.x % arguments.parts * kPartTokens;
  const int64_t last = token + kPartTokens < arguments.tokens ? token + kPartTokens : arguments.tokens;
  Channel<T, kWidth> one(arguments, batch, channel);
  float sums[kWidth] = {}, grad_weight[kWidth] = {}, grad_bias = 0;
  for (bool is_new = true; token < last; ++token) {
    if (is_new || token >= one.sequence.end) {
      one.sequence = sequence_of(arguments, batch, token);
#pragma unroll
      for (int i = 0; i + 1 < kWidth; ++i) sums[i + 1] = one.grad_sum(token + i);
      is_new = false;
    }
    if (token >= one.sequence.end) {  // in no sequence
      one.write(arguments.output, token, 0.0f);
      continue;
    }
#pragma unroll
    for (int i = 0; i + 1 < kWidth; ++i) sums[i] = sums[i + 1];
    sums[kWidth - 1] = one.grad_sum(token + kWidth - 1);
    one.write(arguments.output, token, one.grad_input(token, sums));
    grad_bias += sums[0];
#pragma unroll
    for (int i = 0; i < kWidth; ++i) grad_weight[i] += sums[0] * one.input(token - kWidth + 1 + i);
  }
  float* to = arguments.sums + static_cast<int64_t>(blockIdx.x) * (kWidth + 1) * arguments.channels + channel;
#pragma unroll
  for (int i = 0; i < kWidth; ++i) to[i * arguments.channels] = grad_weight[i];
  to[kWidth * arguments.channels] = grad_bias;
}

template <class T, int kWidth>
__global__ void __launch_bounds__(kThreads) differentiate_states(const __grid_constant__ ConvArguments arguments) {
  const int64_t channel = static_cast<int64_t>(blockIdx.y) * kThreads + threadIdx.x;
  if (channel >= arguments.channels) return;
  const int64_t sequence = blockIdx.x;
  Channel<T, kWidth> one(arguments, arguments.offsets == nullptr ? sequence : 0, channel);
  one.sequence = sequence_at(arguments, sequence);
  for (int row = 0; row + 1 < kWidth; ++row) {
    const int64_t token = one.sequence.begin - kWidth + 1 + row;
    float sums[kWidth];
#pragma unroll
    for (int i = 0; i < kWidth; ++i) sums[i] = one.grad_sum(token + i);
    const int64_t at = (sequence * (kWidth - 1) + row) * arguments.channels + channel;
    static_cast<T*>(arguments.grad_initial)[at] = tile::from_float<T>(one.grad_input(token, sums));
  }
}

// Sums over parts, in order: the same bits in every run.
template <class T, int kWidth>
__global__ void __launch_bounds__(kSumThreads) sum_parts(const __grid_constant__ ConvArguments arguments) {
  const int64_t channel = static_cast<int64_t>(blockIdx.x) * kSumThreads + threadIdx.x;
  if (channel >= arguments.channels) return;
  const int row = static_cast<int>(blockIdx.y);  // a tap of the weight, or the bias
  float sum = 0;
  const int64_t parts = arguments.batch * arguments.parts;
  for (int64_t part = 0; part < parts; ++part) {
    sum += arguments.sums[(part * (kWidth + 1) + row) * arguments.channels + channel];
  }
  if (row < kWidth) {
    static_cast<T*>(arguments.grad_weight)[channel * kWidth + row] = tile::from_float<T>(sum);
  } else if (arguments.grad_bias != nullptr) {
    static_cast<T*>(arguments.grad_bias)[channel] = tile::from_float<T>(sum);
  }
}

}  // namespace kernel_pytorch::causal_conv1d
