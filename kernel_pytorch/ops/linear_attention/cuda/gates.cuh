// The gradients of gates, of those of query and key in fp32 (scan_cuda.h).
#pragma once

#include "kernel_pytorch/ops/linear_attention/cuda/sequence.cuh"

namespace kernel_pytorch::linear_attention {

__device__ __forceinline__ float sum_of_warp(float value) {
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) value += __shfl_xor_sync(0xffffffffu, value, distance);
  return value;
}

// A warp takes a row of one token and head: gradients in the element type, terms of each column and their sum.
template <class T>
__global__ void __launch_bounds__(kGateThreads) gate_terms(const __grid_constant__ GateArguments arguments) {
  const int64_t row = static_cast<int64_t>(blockIdx.x) * (kGateThreads / 32) + threadIdx.x / 32;
  if (row >= arguments.rows) return;
  const int head = static_cast<int>(row % arguments.heads);
  const int64_t token_row = row / arguments.heads, batch = token_row / arguments.tokens;
  const int64_t token = token_row - batch * arguments.tokens;
  const T* query = row_of<T>(arguments.query, batch, token, head);
  const T* key = row_of<T>(arguments.key, batch, token, head);
  float sum = 0;
  for (int i = threadIdx.x % 32; i < arguments.columns; i += 32) {
    const int64_t at = row * arguments.columns + i;
    const float grad_query = arguments.grad_query[at], grad_key = arguments.grad_key[at];
    const float term = tile::to_float<T>(query[i]) * grad_query - tile::to_float<T>(key[i]) * grad_key;
    static_cast<T*>(arguments.grad_query_out)[at] = tile::from_float<T>(grad_query);
    static_cast<T*>(arguments.grad_key_out)[at] = tile::from_float<T>(grad_key);
    arguments.grad_query[at] = term;
    sum += term;
  }
  sum = sum_of_warp(sum);
  if (threadIdx.x % 32 == 0) arguments.terms[row] = sum;
}

// The final state times its gradient, of one column of one head; 0 where there is none.
__device__ __forceinline__ float end_term(const GateArguments& arguments, int64_t index, int column) {
  if (arguments.grad_final_state == nullptr) return 0;
  const int64_t first = index * arguments.columns * arguments.values;
  float sum = 0;
  for (int j = 0; j < arguments.values; ++j) {
    const float state =
        arguments
            .final_state[first + (arguments.final_is_turned ? static_cast<int64_t>(j) * arguments.columns + column
                                                            : static_cast<int64_t>(column) * arguments.values + j)];
    sum += state * arguments.grad_final_state[first + static_cast<int64_t>(column) * arguments.values + j];
  }
  return sum;
}

template <class T>
__device__ __forceinline__ void store_gradient(void* to, bool is_float, int64_t at, float value) {
  if (is_float) {
    static_cast<float*>(to)[at] = value;
  } else {
    static_cast<T*>(to)[at] = tile::from_float<T>(value);
  }
}

// Sums of terms from the last token back, per head: a block takes one head of a sequence, a tile of tokens at a time.
template <class T>
__global__ void __launch_bounds__(kGateThreads) sum_gates(const __grid_constant__ GateArguments arguments) {
  constexpr int kWarps = kGateThreads / 32;
  __shared__ float warp_sums[kWarps];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, head = blockIdx.x % arguments.heads;
  const int64_t sequence = blockIdx.x / arguments.heads;
  const Span span = span_of(arguments, sequence);
  const auto block_sum = [&](float value) {
    const float of_warp = sum_of_warp(value);
    __syncthreads();
    if (lane == 0) warp_sums[warp] = of_warp;
    __syncthreads();
    float sum = 0;
    for (int w = 0; w < kWarps; ++w) sum += warp_sums[w];
    return sum;
  };
  float end = 0;
  for (int i = threadIdx.x; i < arguments.columns; i += kGateThreads) end += end_term(arguments, blockIdx.x, i);
  float carry = block_sum(end), total = 0;
#pragma unroll 1
  for (int64_t last = span.end; last > span.begin; last -= kGateThreads) {
    const int64_t token = last - 1 - static_cast<int64_t>(threadIdx.x);
    const bool is_there = token >= span.begin;
    const int64_t at = (span.batch * arguments.tokens + token) * arguments.heads + head;
    float sum = is_there ? arguments.terms[at] : 0.0f;
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2) {
      const float other = __shfl_up_sync(0xffffffffu, sum, distance);
      if (lane >= distance) sum += other;
    }
    __syncthreads();
    if (lane == 31) warp_sums[warp] = sum;
    __syncthreads();
    float before = carry, all = carry;
    for (int w = 0; w < kWarps; ++w) {
      if (w < warp) before += warp_sums[w];
      all += warp_sums[w];
    }
    carry = all;
    // Nothing decays in front of the first token.
    const bool is_nothing = token == span.begin && !arguments.has_initial;
    const float gradient = is_nothing ? 0.0f : before + sum;
    if (!is_there) continue;
    total += gradient;
    if (arguments.grad_gate != nullptr) {
      store_gradient<T>(arguments.grad_gate, arguments.gate_is_float, at, gradient);
    }
  }
  total = block_sum(total);
  if (threadIdx.x == 0 && arguments.decay_sums != nullptr) arguments.decay_sums[blockIdx.x] = total;
}

// The same of each column: a block takes 32 columns of one head of a sequence, a lane one of them and a warp every
// eighth strip of tokens. kMakesTerms: what gate_terms does as well, in the same pass.
template <class T, bool kMakesTerms>
__device__ __forceinline__ void sum_columns(const GateArguments& arguments) {
  constexpr int kWarps = kGateThreads / 32;
  constexpr int kStrip = kMakesTerms && sizeof(T) == 4 ? 4 : 8;  // of fp32 eight spill
  __shared__ float strip_sums[kWarps][32];
  const int head = blockIdx.x % arguments.heads, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int column = blockIdx.y * kGateColumns + lane;
  const bool has_column = column < arguments.columns;
  const Span span = span_of(arguments, blockIdx.x / arguments.heads);
  float carry = has_column ? end_term(arguments, blockIdx.x, column) : 0.0f;
#pragma unroll 1
  for (int64_t last = span.end; last > span.begin; last -= kWarps * kStrip) {
    const int64_t first = last - 1 - warp * kStrip;  // the strip's last token, where its sum begins
    float sums[kStrip], sum = 0;
    if constexpr (kMakesTerms) {
      float grad_query[kStrip], grad_key[kStrip], query[kStrip], key[kStrip];
#pragma unroll
      for (int i = 0; i < kStrip; ++i) {
        const bool is_there = has_column && first - i >= span.begin;
        const int64_t row = (span.batch * arguments.tokens + first - i) * arguments.heads + head;
        const int64_t at = row * arguments.columns + column;
        grad_query[i] = is_there ? arguments.grad_query[at] : 0.0f;
        grad_key[i] = is_there ? arguments.grad_key[at] : 0.0f;
        query[i] = is_there ? tile::to_float<T>(row_of<T>(arguments.query, span.batch, first - i, head)[column]) : 0.0f;
        key[i] = is_there ? tile::to_float<T>(row_of<T>(arguments.key, span.batch, first - i, head)[column]) : 0.0f;
      }
#pragma unroll
      for (int i = 0; i < kStrip; ++i) {
        sum += query[i] * grad_query[i] - key[i] * grad_key[i];
        sums[i] = sum;
        if (!has_column || first - i < span.begin) continue;
        const int64_t row = (span.batch * arguments.tokens + first - i) * arguments.heads + head;
        const int64_t at = row * arguments.columns + column;
        static_cast<T*>(arguments.grad_query_out)[at] = tile::from_float<T>(grad_query[i]);
        static_cast<T*>(arguments.grad_key_out)[at] = tile::from_float<T>(grad_key[i]);
      }
    } else {
#pragma unroll
      for (int i = 0; i < kStrip; ++i) {
        const bool is_there = has_column && first - i >= span.begin;
        const int64_t row = (span.batch * arguments.tokens + first - i) * arguments.heads + head;
        sums[i] = is_there ? arguments.grad_query[row * arguments.columns + column] : 0.0f;
      }
#pragma unroll
      for (int i = 0; i < kStrip; ++i) {
        sum += sums[i];
        sums[i] = sum;
      }
    }
    __syncthreads();
    strip_sums[warp][lane] = sum;
    __syncthreads();
    float before = carry;
    for (int w = 0; w < kWarps; ++w) {
      if (w < warp) before += strip_sums[w][lane];
      carry += strip_sums[w][lane];
    }
#pragma unroll
    for (int i = 0; i < kStrip; ++i) {
      if (!has_column || first - i < span.begin) continue;
      const int64_t row = (span.batch * arguments.tokens + first - i) * arguments.heads + head;
      // Nothing decays in front of the first token.
      const bool is_nothing = first - i == span.begin && !arguments.has_initial;
      store_gradient<T>(arguments.grad_channel_gate, arguments.channel_gate_is_float, row * arguments.columns + column,
                        is_nothing ? 0.0f : before + sums[i]);
    }
  }
}
template <class T>
__global__ void __launch_bounds__(kGateThreads) sum_channel_gates(const __grid_constant__ GateArguments arguments) {
  sum_columns<T, false>(arguments);
}
template <class T>
__global__ void __launch_bounds__(kGateThreads) finish_channel_gates(const __grid_constant__ GateArguments arguments) {
  sum_columns<T, true>(arguments);
}

// grad_decay[head] = the sum over sequences.
__global__ void __launch_bounds__(kGateThreads)
    sum_decays(const float* sums, float* grad_decay, int32_t sequences, int32_t heads) {
  const int head = blockIdx.x * kGateThreads + threadIdx.x;
  if (head >= heads) return;
  float sum = 0;
  for (int i = 0; i < sequences; ++i) sum += sums[static_cast<int64_t>(i) * heads + head];
  grad_decay[head] = sum;
}

}  // namespace kernel_pytorch::linear_attention
