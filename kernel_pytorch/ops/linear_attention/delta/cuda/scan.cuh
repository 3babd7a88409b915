// One token after another: a warp holds kWarpColumns columns of one head's state, each lane every 32nd row of them, so
// that sums over rows are shuffles and warps never wait for one another (scan_cuda.h says which scans there are).
#pragma once

#include "kernel_pytorch/cuda/tile/element.cuh"
#include "kernel_pytorch/cuda/tile/reduce.cuh"
#include "kernel_pytorch/ops/linear_attention/cuda/sequence.cuh"
#include "kernel_pytorch/ops/linear_attention/delta/cuda/scan_cuda.h"

namespace kernel_pytorch::linear_attention::delta {

inline constexpr unsigned kAllLanes = 0xffffffffu;
inline constexpr float kEpsilon = 1e-6f;

// Sums over all lanes; lane l has that of column l / 4.
__device__ __forceinline__ float sum_columns(float (&parts)[kWarpColumns]) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int half = kWarpColumns / 2, bit = 16; half > 0; half /= 2, bit /= 2) {
    const bool takes_upper = (lane & bit) != 0;
#pragma unroll
    for (int i = 0; i < half; ++i) {
      const float given = takes_upper ? parts[i] : parts[i + half];
      const float kept = takes_upper ? parts[i + half] : parts[i];
      parts[i] = kept + __shfl_xor_sync(kAllLanes, given, bit);
    }
  }
  float sum = parts[0];
  sum += __shfl_xor_sync(kAllLanes, sum, 2);
  sum += __shfl_xor_sync(kAllLanes, sum, 1);
  return sum;
}
// What lanes have of their own columns, of all columns.
__device__ __forceinline__ void share_columns(float own, float (&columns)[kWarpColumns]) {
#pragma unroll
  for (int i = 0; i < kWarpColumns; ++i) columns[i] = __shfl_sync(kAllLanes, own, 4 * i);
}

// What a lane reads of a token: of its rows, and of its own column.
template <int kRows>
struct Token {
  float first[kRows], second[kRows], third[kRows];
  float column, other_column, column_gate;
  float gate, beta;
};

template <class T, int kRows, Scan kScan>
struct Reader {
  const DeltaArguments& arguments;
  int64_t batch;
  int head, column;  // column: the lane's own

  __device__ __forceinline__ static int row(int r) { return r * 32 + static_cast<int>(threadIdx.x % 32); }
  __device__ __forceinline__ int64_t place(int64_t token) const {
    return (batch * arguments.tokens + token) * arguments.heads + head;
  }
  __device__ __forceinline__ float element(const ScanTensor& tensor, int64_t token, int at, int limit) const {
    return at < limit ? tile::to_float<T>(row_of<T>(tensor, batch, token, head)[at]) : 0.0f;
  }
  __device__ __forceinline__ float gate_of(int64_t token, int at) const {
    if (arguments.channel_gate.data == nullptr || at >= arguments.columns) return 0;
    return element_of<T>(arguments.channel_gate, batch, token, head, at);
  }

  __device__ __forceinline__ Token<kRows> read(int64_t token) const {
    Token<kRows> now{};
    now.beta = element_of<T>(arguments.beta, batch, token, head, 0);
    if (arguments.gate.data != nullptr) now.gate = element_of<T>(arguments.gate, batch, token, head, 0);
    if constexpr (kScan == Scan::kForward || kScan == Scan::kGradient) {
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        now.first[r] = element(arguments.query, token, row(r), arguments.columns);
        now.second[r] = element(arguments.key, token, row(r), arguments.columns);
        now.third[r] = gate_of(token, row(r));
      }
      const ScanTensor& values = kScan == Scan::kForward ? arguments.value : arguments.grad_output;
      now.column = element(values, token, column, arguments.values);
    } else {
      const int64_t at = place(token) * arguments.values;
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        if (row(r) >= arguments.values) continue;
        now.first[r] = arguments.errors[at + row(r)];
        now.second[r] = arguments.grad_u[at + row(r)];
        now.third[r] = element(arguments.grad_output, token, row(r), arguments.values);
      }
      now.column = element(arguments.key, token, column, arguments.columns);
      now.column_gate = gate_of(token, column);
      if (kScan == Scan::kWrites) now.other_column = element(arguments.query, token, column, arguments.columns);
      if (arguments.normalizes) {
        now.column *= arguments.inverse_norms[place(token) * 2 + 1];
        now.other_column *= arguments.inverse_norms[place(token) * 2];
      }
      now.other_column *= arguments.scale;
    }
    return now;
  }

  // Where rows are of queries and keys: their factors, with the scale.
  __device__ __forceinline__ void scale_rows(Token<kRows>& now, int64_t token) const {
    float query_factor = arguments.scale, key_factor = 1;
    if (arguments.normalizes) {
      float query_sum = 0, key_sum = 0;
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        query_sum += now.first[r] * now.first[r];
        key_sum += now.second[r] * now.second[r];
      }
      const float query_inverse = 1.0f / sqrtf(tile::sum_lanes<32>(query_sum) + kEpsilon);
      key_factor = 1.0f / sqrtf(tile::sum_lanes<32>(key_sum) + kEpsilon);
      query_factor *= query_inverse;
      if (arguments.inverse_norms != nullptr && column == 0 && threadIdx.x % 32 == 0) {
        arguments.inverse_norms[place(token) * 2] = query_inverse;
        arguments.inverse_norms[place(token) * 2 + 1] = key_factor;
      }
    }
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      now.first[r] *= query_factor;
      now.second[r] *= key_factor;
      now.third[r] = exponential(now.gate + now.third[r]);
    }
  }
};

// Products of rows and the state, summed over rows.
template <int kRows>
__device__ __forceinline__ float read_state(const float (&rows)[kRows], const float (&state)[kRows][kWarpColumns]) {
  float parts[kWarpColumns] = {};
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
#pragma unroll
    for (int j = 0; j < kWarpColumns; ++j) parts[j] += rows[r] * state[r][j];
  }
  return sum_columns(parts);
}
template <int kRows>
__device__ __forceinline__ void add_product(const float (&rows)[kRows], float own, float sign,
                                            float (&state)[kRows][kWarpColumns]) {
  float columns[kWarpColumns];
  share_columns(sign * own, columns);
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
#pragma unroll
    for (int j = 0; j < kWarpColumns; ++j) state[r][j] += rows[r] * columns[j];
  }
}
template <int kRows>
__device__ __forceinline__ void scale_by_rows(const float (&factors)[kRows], float (&state)[kRows][kWarpColumns]) {
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
#pragma unroll
    for (int j = 0; j < kWarpColumns; ++j) state[r][j] *= factors[r];
  }
}
template <int kRows>
__device__ __forceinline__ void scale_by_columns(float own, float (&state)[kRows][kWarpColumns]) {
  float columns[kWarpColumns];
  share_columns(own, columns);
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
#pragma unroll
    for (int j = 0; j < kWarpColumns; ++j) state[r][j] *= columns[j];
  }
}

// The place of a state's element; `index` counts heads of states.
__device__ __forceinline__ int64_t state_place(const DeltaArguments& arguments, int64_t index, int row, int column,
                                               bool is_turned) {
  const int64_t first = index * arguments.columns * arguments.values;
  return first + (is_turned ? static_cast<int64_t>(column) * arguments.values + row
                            : static_cast<int64_t>(row) * arguments.values + column);
}

template <class T, int kRows, Scan kScan>
__global__ void __launch_bounds__(kScanThreads) scan_by_steps(const __grid_constant__ DeltaArguments arguments) {
  constexpr bool kIsTurned = kScan == Scan::kReads || kScan == Scan::kWrites;
  constexpr bool kIsBackwards = kScan == Scan::kGradient || kScan == Scan::kWrites;
  const int lane = threadIdx.x % 32, head = blockIdx.x % arguments.heads;
  const int64_t sequence = blockIdx.x / arguments.heads;
  const int all_columns = kIsTurned ? arguments.columns : arguments.values;
  const int all_rows = kIsTurned ? arguments.values : arguments.columns;
  const int first_column = (blockIdx.y * kScanWarps + threadIdx.x / 32) * kWarpColumns;
  if (first_column >= all_columns) return;  // the warp: none waits for another
  const Span span = span_of(arguments, sequence);
  const int64_t count = span.end - span.begin;
  const int own_column = first_column + lane / 4;
  const bool writes_column = lane % 4 == 0 && own_column < all_columns;
  const Reader<T, kRows, kScan> reader{arguments, span.batch, head, own_column};
  const auto token_at = [&](int64_t i) { return kIsBackwards ? span.end - 1 - i : span.begin + i; };
  // A token is read while the one before is computed, where registers hold both.
  constexpr bool kReadsAhead = !(kIsTurned && kRows == 8);
  Token<kRows> next{};
  if (kReadsAhead && count > 0) next = reader.read(token_at(0));

  int64_t slot = sequence;
  bool has_slot = true;
  if (arguments.state_index != nullptr) {
    slot = index_at(arguments.state_index, arguments.index_is_wide, sequence);
    has_slot = slot >= 0 && slot < arguments.slots;
  }
  const int64_t index = slot * arguments.heads + head;
  float state[kRows][kWarpColumns];
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    const int row = reader.row(r);
    const bool has_row = arguments.initial != nullptr && has_slot && row < all_rows;
    const float* from =
        has_row ? arguments.initial + state_place(arguments, index, row, first_column, kIsTurned) : nullptr;
    if (!kIsTurned && arguments.has_vectors && has_row) {
#pragma unroll
      for (int j = 0; j < kWarpColumns; j += 4) {
        const bool is_there = first_column + j < all_columns;
        const float4 four = is_there ? *reinterpret_cast<const float4*>(from + j) : float4{0, 0, 0, 0};
        state[r][j] = four.x, state[r][j + 1] = four.y, state[r][j + 2] = four.z, state[r][j + 3] = four.w;
      }
    } else {
#pragma unroll
      for (int j = 0; j < kWarpColumns; ++j) {
        const int64_t step = kIsTurned ? static_cast<int64_t>(j) * arguments.values : j;
        state[r][j] = has_row && first_column + j < all_columns ? from[step] : 0.0f;
      }
    }
  }

#pragma unroll 1
  for (int64_t i = 0; i < count; ++i) {
    const int64_t token = token_at(i);
    Token<kRows> now = kReadsAhead ? next : reader.read(token);
    if (kReadsAhead && i + 1 < count) next = reader.read(token_at(i + 1));
    const int64_t place = reader.place(token);
    if constexpr (kScan == Scan::kForward) {
      reader.scale_rows(now, token);
      scale_by_rows(now.third, state);
      const float error = now.column - read_state(now.second, state);
      add_product(now.second, now.beta * error, 1.0f, state);
      if (arguments.errors != nullptr && writes_column) arguments.errors[place * arguments.values + own_column] = error;
      if (arguments.output.data != nullptr) {
        const float result = read_state(now.first, state);
        if (writes_column) {
          row_of<T>(arguments.output, span.batch, token, head)[own_column] = tile::from_float<T>(result);
        }
      }
    } else if constexpr (kScan == Scan::kGradient) {
      reader.scale_rows(now, token);
      add_product(now.first, now.column, 1.0f, state);
      const float grad_u = read_state(now.second, state);
      if (writes_column) arguments.grad_u[place * arguments.values + own_column] = grad_u;
      add_product(now.second, now.beta * grad_u, -1.0f, state);
      scale_by_rows(now.third, state);
    } else if constexpr (kScan == Scan::kReads) {
      scale_by_columns(exponential(now.gate + now.column_gate), state);
      const float read = read_state(now.second, state);
      add_product(now.first, now.beta * now.column, 1.0f, state);
      const float grad_query = read_state(now.third, state);
      if (writes_column) {
        arguments.grad_key_read[place * arguments.columns + own_column] = -now.beta * read;
        arguments.grad_query[place * arguments.columns + own_column] = arguments.scale * grad_query;
      }
    } else {
      add_product(now.third, now.other_column, 1.0f, state);
      const float written = read_state(now.first, state);
      if (writes_column) arguments.grad_key_written[place * arguments.columns + own_column] = now.beta * written;
      add_product(now.second, now.beta * now.column, -1.0f, state);
      scale_by_columns(exponential(now.gate + now.column_gate), state);
    }
  }

  if (arguments.final == nullptr || !has_slot) return;
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    const int row = reader.row(r);
    if (row >= all_rows) continue;
    float* to = arguments.final + state_place(arguments, index, row, first_column, kIsTurned);
    if (!kIsTurned && arguments.has_vectors) {
#pragma unroll
      for (int j = 0; j < kWarpColumns; j += 4) {
        if (first_column + j < all_columns) {
          *reinterpret_cast<float4*>(to + j) = float4{state[r][j], state[r][j + 1], state[r][j + 2], state[r][j + 3]};
        }
      }
    } else {
#pragma unroll
      for (int j = 0; j < kWarpColumns; ++j) {
        if (first_column + j < all_columns)
          to[kIsTurned ? static_cast<int64_t>(j) * arguments.values : j] = state[r][j];
      }
    }
  }
}

// A warp takes a row of one token and head: gradients in their types, behind the normalisation, and the gates' terms,
// q dq + k dk_read - k dk_written of normalised rows.
template <class T>
__global__ void __launch_bounds__(kFinishThreads) finish_gradients(const __grid_constant__ DeltaArguments arguments) {
  const int64_t row = static_cast<int64_t>(blockIdx.x) * (kFinishThreads / 32) + threadIdx.x / 32;
  if (row >= arguments.rows) return;
  const int head = static_cast<int>(row % arguments.heads), lane = threadIdx.x % 32;
  const int64_t token_row = row / arguments.heads, batch = token_row / arguments.tokens;
  const int64_t token = token_row - batch * arguments.tokens;
  const T* query = row_of<T>(arguments.query, batch, token, head);
  const T* key = row_of<T>(arguments.key, batch, token, head);
  const float beta = element_of<T>(arguments.beta, batch, token, head, 0);
  float grad_beta = 0;
  for (int j = lane; j < arguments.values; j += 32) {
    const int64_t at = row * arguments.values + j;
    const float grad_u = arguments.grad_u[at];
    grad_beta += grad_u * arguments.errors[at];
    static_cast<T*>(arguments.grad_value_out)[at] = tile::from_float<T>(beta * grad_u);
  }
  grad_beta = tile::sum_lanes<32>(grad_beta);
  if (lane == 0) {
    if (arguments.beta_is_float) {
      static_cast<float*>(arguments.grad_beta_out)[row] = grad_beta;
    } else {
      static_cast<T*>(arguments.grad_beta_out)[row] = tile::from_float<T>(grad_beta);
    }
  }
  const float query_inverse = arguments.normalizes ? arguments.inverse_norms[row * 2] : 1.0f;
  const float key_inverse = arguments.normalizes ? arguments.inverse_norms[row * 2 + 1] : 1.0f;
  float query_along = 0, key_along = 0, term_sum = 0;
  for (int i = lane; i < arguments.columns; i += 32) {
    const int64_t at = row * arguments.columns + i;
    const float q = tile::to_float<T>(query[i]) * query_inverse, k = tile::to_float<T>(key[i]) * key_inverse;
    const float read = arguments.grad_key_read[at], written = arguments.grad_key_written[at];
    query_along += q * arguments.grad_query[at];
    key_along += k * (read + written);
    term_sum += q * arguments.grad_query[at] + k * (read - written);
  }
  query_along = arguments.normalizes ? tile::sum_lanes<32>(query_along) : 0.0f;
  key_along = arguments.normalizes ? tile::sum_lanes<32>(key_along) : 0.0f;
  for (int i = lane; i < arguments.columns; i += 32) {
    const int64_t at = row * arguments.columns + i;
    const float q = tile::to_float<T>(query[i]) * query_inverse, k = tile::to_float<T>(key[i]) * key_inverse;
    const float read = arguments.grad_key_read[at], written = arguments.grad_key_written[at];
    const float grad_query = arguments.grad_query[at], grad_key = read + written;
    static_cast<T*>(arguments.grad_query_out)[at] = tile::from_float<T>(query_inverse * (grad_query - q * query_along));
    static_cast<T*>(arguments.grad_key_out)[at] = tile::from_float<T>(key_inverse * (grad_key - k * key_along));
    arguments.grad_query[at] = q * grad_query + k * (read - written);
  }
  term_sum = tile::sum_lanes<32>(term_sum);
  if (lane == 0 && arguments.terms != nullptr) arguments.terms[row] = term_sum;
}

}  // namespace kernel_pytorch::linear_attention::delta
