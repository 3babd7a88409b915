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

template <int kVector>
struct alignas(4 * kVector) StateVector {
  float elements[kVector];
};

// Elements of a state from `column` on; turned: the other way round.
__device__ __forceinline__ int64_t state_place(const ScanArguments& arguments, int64_t index, int row, int column,
                                               bool is_turned) {
  return is_turned ? (index * arguments.values + column) * arguments.columns + row
                   : (index * arguments.columns + row) * arguments.values + column;
}

// Values of row r behind a thread's first. 32 bits hold the places of one state.
template <int kVector>
__device__ __forceinline__ void read_vector(const float* first, int r, const ScanArguments& arguments, bool is_turned,
                                            float (&to)[kVector]) {
  if (is_turned) {
#pragma unroll
    for (int i = 0; i < kVector; ++i) to[i] = first[i * arguments.columns + r];
  } else {
    const auto values = *reinterpret_cast<const StateVector<kVector>*>(first + r * arguments.values);
#pragma unroll
    for (int i = 0; i < kVector; ++i) to[i] = values.elements[i];
  }
}
template <int kVector>
__device__ __forceinline__ void write_vector(float* first, int r, const ScanArguments& arguments, bool is_turned,
                                             const float (&from)[kVector]) {
  if (is_turned) {
#pragma unroll
    for (int i = 0; i < kVector; ++i) first[i * arguments.columns + r] = from[i];
  } else {
    StateVector<kVector> values;
#pragma unroll
    for (int i = 0; i < kVector; ++i) values.elements[i] = from[i];
    *reinterpret_cast<StateVector<kVector>*>(first + r * arguments.values) = values;
  }
}

// A thread holds 32 numbers of the state, so that several blocks fit a multiprocessor: a step waits for memory alone.
template <class T, class Out, int kRows, int kVector>
__global__ void __launch_bounds__(kStepThreads, 2) scan_by_steps(const __grid_constant__ ScanArguments arguments) {
  constexpr int kColumns = 32 * kVector;
  __shared__ float partial[2][kStepWarps][kColumns];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, head = blockIdx.x % arguments.heads;
  const int64_t sequence = blockIdx.x / arguments.heads;
  const Span span = span_of(arguments, sequence);
  const int first_row = warp * kRows, column = (blockIdx.y * 32 + lane) * kVector;
  const bool has_column = column < arguments.values;
  const int64_t count = span.end - span.begin;
  const auto token_at = [&](int64_t i) { return arguments.backwards ? span.end - 1 - i : span.begin + i; };
  const int row = first_row + lane;
  TokenInputs<kVector> next{};
  if (count > 0) next = read_token<T, kRows, kVector>(arguments, span.batch, token_at(0), head, row, column);
  float state[kRows][kVector];
  const int rows = has_column ? arguments.columns - first_row : 0;  // that this thread has; kRows at most
  int64_t slot = sequence;
  bool has_slot = true;
  if (arguments.state_index != nullptr) {
    slot = index_at(arguments.state_index, arguments.index_is_wide, sequence);
    has_slot = slot >= 0 && slot < arguments.slots;
  }
  const int64_t index = slot * arguments.heads + head;
  const bool has_initial = arguments.initial != nullptr && has_slot;
  const float* from = arguments.initial;
  if (has_initial) from += state_place(arguments, index, first_row, column, arguments.initial_is_turned);
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    if (has_initial && r < rows) {
      read_vector<kVector>(from, r, arguments, arguments.initial_is_turned, state[r]);
    } else {
#pragma unroll
      for (float& element : state[r]) element = 0;
    }
  }
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
  if (arguments.final == nullptr || !has_slot) return;
  float* to = arguments.final + state_place(arguments, index, first_row, column, arguments.final_is_turned);
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    if (r < rows) write_vector<kVector>(to, r, arguments, arguments.final_is_turned, state[r]);
  }
}

}  // namespace kernel_pytorch::linear_attention
