// What host and device agree on for the delta rule by chunks of 64 tokens on Hopper: what the first kernel prepares of
// each chunk, the second one's shared memory, arguments.
//
// Inside a chunk, with G_t the sum of its gates up to token t and S the state in front of it:
//
//   A_ts = beta_t key_t key_s e^(G_t - G_s), s < t;   M = (I + A)^-1 diag(beta)
//   P_ts = scale query_t key_s e^(G_t - G_s), s <= t
//   U = M (V - (e^G K) S);   O = (e^G Q) S + P U;   S <- e^(G_last) S + (e^(G_last - G) K)^T U
//
// M, P and the factors of rows depend on no state: the first kernel computes them, all chunks at once. The second one
// goes from chunk to chunk.
#pragma once

#include "kernel_pytorch/cuda/tile/tensor_map_cuda.h"
#include "kernel_pytorch/ops/linear_attention/cuda/scan_cuda.h"

namespace kernel_pytorch::linear_attention::delta {

inline constexpr int kChunkTokens = 64;
inline constexpr int kGroupValues = 64;  // of the state that a warpgroup holds
inline constexpr int kPrepareThreads = 128;

// M and P lie as fragments of a product's first operand: of each 16 columns four words for each of 128 threads.
inline constexpr int kMatrixBytes = kChunkTokens * kChunkTokens * 2;
// Of a chunk and head: factors of keys that read the state, of queries, of keys that are written, and betas, each of 64
// tokens; then what is kept of 128 columns of the state.
enum FactorPlace : int32_t {
  kReadKeys = 0,
  kReadQueries = kChunkTokens,
  kWrittenKeys = 2 * kChunkTokens,
  kBetas = 3 * kChunkTokens,
  kKept = 4 * kChunkTokens
};
inline constexpr int kFactors = 4 * kChunkTokens + 128;
inline constexpr int kFactorBytes = kFactors * 4;

// Shared memory of the preparation with gates of channels: keys and queries, then sums of gates of each column.
KP_SHARED_CODE constexpr int prepared_row_bytes(int width) {
  return width * 2 + 16;
}
KP_SHARED_CODE constexpr int sums_pitch(int width) {  // floats: rows of a fragment fall into different banks
  return width + 8;
}
inline constexpr int kSystemPitch = 68;
inline constexpr int kSystemBytes = kChunkTokens * kSystemPitch * 4;  // two of them take the place of keys and queries
KP_SHARED_CODE constexpr int channel_shared_bytes(int width) {
  return 2 * kSystemBytes + kChunkTokens * sums_pitch(width) * 4;
}

struct PrepareArguments {
  ScanTensor query, key, beta, gate, channel_gate;
  void *matrices, *weights;                   // of [slots, heads]: M and P; for a gradient N = (I + A')^-1 and P^T
  void* turned_matrices;                      // N^T
  float* factors;                             // [slots, heads, kFactors]
  void *read_key, *read_query, *written_key;  // of gates of channels: rows with their factors [slots, heads, 64, width]
  const void* offsets;                        // of packed sequences; null: a batch
  int64_t tokens, sequences, chunks;          // chunks: of a sequence of a batch
  int32_t heads, columns;
  float scale;
  bool offsets_are_wide, normalizes;
};

// What a scan over chunks does: the forward; for the gradient the forward's states and errors, then from the last chunk
// back the state's gradient (gradient.cuh).
enum class Pass : int32_t { kForward, kStates, kGradient };

struct DeltaConfig {
  int columns = 128;   // of the state: 64 or 128; fewer are filled up with zeros
  int warpgroups = 2;  // that compute, kGroupValues values each
  bool by_channel = false;
  Pass pass = Pass::kForward;
};

KP_SHARED_CODE constexpr int delta_stages(DeltaConfig config) {
  return config.columns == 64 ? 3 : 2;
}
KP_SHARED_CODE constexpr int delta_threads(DeltaConfig config) {
  return 128 * (config.warpgroups + 1);
}
KP_SHARED_CODE constexpr int delta_row_bytes(DeltaConfig config) {  // of queries or keys of a stage
  return kChunkTokens * config.columns * 2;
}
inline constexpr int kGroupBytes = kChunkTokens * kGroupValues * 2;  // values of a warpgroup
// A stage: keys, queries (but for states), written keys (by_channel), values, M, P (but for states), factors.
KP_SHARED_CODE constexpr int queries_at(DeltaConfig config) {
  return delta_row_bytes(config);
}
KP_SHARED_CODE constexpr int written_at(DeltaConfig config) {
  return (config.by_channel ? 2 : 0) * delta_row_bytes(config);
}
KP_SHARED_CODE constexpr int values_at(DeltaConfig config) {
  return (config.pass == Pass::kStates ? 1 : config.by_channel ? 3 : 2) * delta_row_bytes(config);
}
KP_SHARED_CODE constexpr int matrix_at(DeltaConfig config) {
  return values_at(config) + config.warpgroups * kGroupBytes;
}
KP_SHARED_CODE constexpr int weights_at(DeltaConfig config) {
  return matrix_at(config) + kMatrixBytes;
}
KP_SHARED_CODE constexpr int factors_at(DeltaConfig config) {
  return weights_at(config) + (config.pass == Pass::kStates ? 0 : kMatrixBytes);
}
KP_SHARED_CODE constexpr int stage_loads(DeltaConfig config) {  // bytes that arrive
  return factors_at(config) + kFactorBytes;
}
KP_SHARED_CODE constexpr int delta_stage_bytes(DeltaConfig config) {
  return factors_at(config) + 2048;
}
KP_SHARED_CODE constexpr int delta_state_bytes(DeltaConfig config) {  // rounded, of one warpgroup
  return config.columns * kGroupValues * 2;
}
// Stages, then a rounded state of each warpgroup, then each one's U (of a gradient two such tiles), then barriers.
KP_SHARED_CODE constexpr int delta_states_at(DeltaConfig config) {
  return delta_stages(config) * delta_stage_bytes(config);
}
KP_SHARED_CODE constexpr int delta_writes_at(DeltaConfig config) {
  return delta_states_at(config) + config.warpgroups * delta_state_bytes(config);
}
KP_SHARED_CODE constexpr int delta_barriers_at(DeltaConfig config) {
  return delta_writes_at(config) + (config.pass == Pass::kGradient ? 2 : 1) * config.warpgroups * kGroupBytes;
}
KP_SHARED_CODE constexpr int delta_shared_bytes(DeltaConfig config) {
  return delta_barriers_at(config) + 64;
}

struct DeltaChunkArguments {
  // [batch, heads, tokens, size]; by_channel keys and queries are what was prepared, [1, 1, rows, width].
  tile::TensorMap query, key, written_key, value;
  ScanTensor output;
  const void *matrices, *weights;
  const float* factors;
  const void* offsets;
  const void* state_index;  // null: states lie as sequences do
  const float* initial;
  float* final;
  // Of a gradient, rounded, [slots, heads, tiles of 64 values, rows, 64]: states of columns in front of each chunk (or
  // their gradients behind it); of tokens errors (or gradients of U).
  void *states, *rows;
  int64_t tokens, chunks, slots;  // slots: of states
  int32_t heads, columns, values, query_group, key_group;
  bool offsets_are_wide, index_is_wide;
};

// The gradients of a chunk, of what the scans left (gradient.cuh).
struct GradientArguments {
  ScanTensor query, key, beta, gate, grad_output, grad_value;
  const void *states, *grad_states, *errors, *grad_writes;  // as DeltaChunkArguments has them
  void *grad_query, *grad_key, *grad_beta, *grad_gate;      // grad_gate null: not wanted
  const void* offsets;
  int64_t tokens, sequences, chunks;
  int32_t heads, columns, values;
  float scale;
  bool offsets_are_wide, normalizes, beta_is_float, gate_is_float, has_initial;
};
inline constexpr int kGradientThreads = 256;
// Shared memory: keys and queries, then two stages of 64 values: four tiles of tokens and two of the state's columns.
inline constexpr int kGradientPitch = 144;  // bytes of a row of 64 values
KP_SHARED_CODE constexpr int gradient_stage_bytes(int width) {
  return (4 * kChunkTokens + 2 * width) * kGradientPitch;
}
KP_SHARED_CODE constexpr int gradient_shared_bytes(int width) {
  return 2 * kChunkTokens * prepared_row_bytes(width) + 2 * gradient_stage_bytes(width);
}

}  // namespace kernel_pytorch::linear_attention::delta
