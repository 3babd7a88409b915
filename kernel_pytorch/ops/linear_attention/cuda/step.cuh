// One token after another: a block holds 32 * kVector values of one head's state in registers, each warp some of its
// columns (rows of the state). What a decoding step needs, and what takes every size up to 256 columns.
#pragma once

#include "kernel_pytorch/cuda/ptx/memory.cuh"
#include "kernel_pytorch/cuda/tile/element.cuh"
#include "kernel_pytorch/ops/linear_attention/cuda/sequence.cuh"

namespace kernel_pytorch::linear_attention {

// What a lane reads of a token: of its row of the state (query, key, factor) and of its values.
template <int kVector>
struct TokenInputs {
  float query, key, factor, value[kVector], value_factor[kVector];
};

template <class T, int kRows, int kVector>
__device__ __forceinline__ TokenInputs<kVector> read_token(const ScanArguments& arguments, int64_t batch, int64_t token,
                                                           int head, int row, int column) {
  TokenInputs<kVector> inputs{};
  const bool has_row = static_cast<int>(threadIdx.x % 32) < kRows && row < arguments.columns;
  const bool has_column = column < arguments.values;
  const float scalar = scalar_gate<T>(arguments, batch, token, head);
  float gate = scalar;
  if (has_row) {
    inputs.query = tile::to_float<T>(row_of<T>(arguments.query, batch, token, head)[row]) * arguments.query_scale;
    inputs.key = tile::to_float<T>(row_of<T>(arguments.key, batch, token, head)[row]) * arguments.key_scale;
    if (!arguments.gates_values) gate += channel_gate<T>(arguments, batch, token, head, row);
  }
  inputs.factor = exponential(gate);
#pragma unroll
  for (int i = 0; i < kVector; ++i) {
    if (!has_column) continue;
    inputs.value[i] = tile::to_float<T>(row_of<T>(arguments.value, batch, token, head)[column + i]);
    inputs.value_factor[i] =
        arguments.gates_values ? exponential(channel_gate<T>(arguments, batch, token, head, column + i)) : 1.0f;
  }
  return inputs;
}

// Elements of a state from `column` on; turned: the other way round.
__device__ __forceinline__ int64_t state_place(const ScanArguments& arguments, int64_t index, int row, int column,
                                               bool is_turned) {
  return is_turned ? (index * arguments.values + column) * arguments.columns + row
                   : (index * arguments.columns + row) * arguments.values + column;
}

template <class T, class Out, int kRows, int kVector>
__global__ void __launch_bounds__(kStepThreads) scan_by_steps(const __grid_constant__ ScanArguments arguments) {
  constexpr int kColumns = 32 * kVector;
  __shared__ float partial[2][kStepWarps][kColumns];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, head = blockIdx.x % arguments.heads;
  const int64_t sequence = blockIdx.x / arguments.heads, index = blockIdx.x;
  const Span span = span_of(arguments, sequence);
  const int first_row = warp * kRows, column = (blockIdx.y * 32 + lane) * kVector;
  const bool has_column = column < arguments.values;
  float state[kRows][kVector];
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    const bool is_there = has_column && first_row + r < arguments.columns && arguments.initial != nullptr;
    if constexpr (kVector == 4) {
      if (is_there && !arguments.initial_is_turned) {
        const auto four = *reinterpret_cast<const float4*>(
            arguments.initial + state_place(arguments, index, first_row + r, column, false));
        state[r][0] = four.x, state[r][1] = four.y, state[r][2] = four.z, state[r][3] = four.w;
        continue;
      }
    }
#pragma unroll
    for (int i = 0; i < kVector; ++i) {
      state[r][i] = is_there ? arguments.initial[state_place(arguments, index, first_row + r, column + i,
                                                             arguments.initial_is_turned)]
                             : 0.0f;
    }
  }
  const int64_t count = span.end - span.begin;
  const auto token_at = [&](int64_t i) { return arguments.backwards ? span.end - 1 - i : span.begin + i; };
  const int row = first_row + lane;
  TokenInputs<kVector> next{};
  if (count > 0) next = read_token<T, kRows, kVector>(arguments, span.batch, token_at(0), head, row, column);
#pragma unroll 1
  for (int64_t i = 0; i < count; ++i) {
    const TokenInputs<kVector> now = next;
    if (i + 1 < count) next = read_token<T, kRows, kVector>(arguments, span.batch, token_at(i + 1), head, row, column);
    float sums[kVector] = {};
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const float query = __shfl_sync(0xffffffffu, now.query, r), key = __shfl_sync(0xffffffffu, now.key, r);
      const float factor = __shfl_sync(0xffffffffu, now.factor, r);
#pragma unroll
      for (int j = 0; j < kVector; ++j) {
        const float kept = factor * now.value_factor[j];
        const float before = arguments.backwards ? state[r][j] : kept * state[r][j];
        const float after = before + key * now.value[j];
        sums[j] += query * after;
        state[r][j] = arguments.backwards ? kept * after : after;
      }
    }
#pragma unroll
    for (int j = 0; j < kVector; ++j) partial[i & 1][warp][lane * kVector + j] = sums[j];
    __syncthreads();
    const int own = blockIdx.y * kColumns + static_cast<int>(threadIdx.x);
    if (threadIdx.x < kColumns && own < arguments.values) {
      float sum = 0;
#pragma unroll
      for (int w = 0; w < kStepWarps; ++w) sum += partial[i & 1][w][threadIdx.x];
      row_of<Out>(arguments.output, span.batch, token_at(i), head)[own] = tile::from_float<Out>(sum);
    }
  }
  if (arguments.final == nullptr || !has_column) return;
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    if (first_row + r >= arguments.columns) break;
    if constexpr (kVector == 4) {
      if (!arguments.final_is_turned) {
        *reinterpret_cast<float4*>(arguments.final + state_place(arguments, index, first_row + r, column, false)) =
            float4{state[r][0], state[r][1], state[r][2], state[r][3]};
        continue;
      }
    }
#pragma unroll
    for (int i = 0; i < kVector; ++i) {
      arguments.final[state_place(arguments, index, first_row + r, column + i, arguments.final_is_turned)] =
          state[r][i];
    }
  }
}

}  // namespace kernel_pytorch::linear_attention
