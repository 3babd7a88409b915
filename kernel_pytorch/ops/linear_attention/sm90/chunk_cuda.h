// What host and device agree on for scans by chunks on Hopper: sizes of tiles, shared memory, arguments.
#pragma once

#include "kernel_pytorch/cuda/tile/tensor_map_cuda.h"
#include "kernel_pytorch/ops/linear_attention/cuda/scan_cuda.h"

namespace kernel_pytorch::linear_attention {

inline constexpr int kSm90Chunk = 64;   // tokens
inline constexpr int kSm90Values = 64;  // of the state that a warpgroup holds

enum class Gates { kNone, kDecay, kToken };

struct ChunkConfig {
  int columns = 128;   // of the state: 64 or 128; fewer are filled up with zeros
  int warpgroups = 2;  // that compute, kSm90Values values each
  Gates gates = Gates::kNone;
  bool only_states = false;  // no queries and no output: the first pass over segments
};

KP_SHARED_CODE constexpr int chunk_stages(ChunkConfig config) {
  return config.columns == 64 ? 4 : 3;
}
KP_SHARED_CODE constexpr int chunk_threads(ChunkConfig config) {
  return 128 * (config.warpgroups + 1);
}
KP_SHARED_CODE constexpr int rows_bytes(ChunkConfig config) {  // of queries or keys of a stage
  return kSm90Chunk * config.columns * 2;
}
KP_SHARED_CODE constexpr int values_bytes() {  // of one warpgroup
  return kSm90Chunk * kSm90Values * 2;
}
KP_SHARED_CODE constexpr int stage_bytes(ChunkConfig config) {
  return (config.only_states ? 1 : 2) * rows_bytes(config) + config.warpgroups * values_bytes();
}
KP_SHARED_CODE constexpr int state_bytes(ChunkConfig config) {  // rounded, of one warpgroup, one of two
  return config.columns * kSm90Values * 2;
}
// Stages, then two states for each warpgroup, then a warpgroup's output, then barriers and gates.
KP_SHARED_CODE constexpr int states_at(ChunkConfig config) {
  return chunk_stages(config) * stage_bytes(config);
}
KP_SHARED_CODE constexpr int outputs_at(ChunkConfig config) {
  return states_at(config) + (config.only_states ? 0 : 2 * config.warpgroups * state_bytes(config));
}
KP_SHARED_CODE constexpr int barriers_at(ChunkConfig config) {
  return outputs_at(config) + (config.only_states ? 0 : config.warpgroups * values_bytes());
}
inline constexpr int kChunkBarrierBytes = 128 + 4 * kSm90Chunk * 4;
KP_SHARED_CODE constexpr int chunk_shared_bytes(ChunkConfig config) {
  return barriers_at(config) + kChunkBarrierBytes;
}

struct ChunkArguments {
  tile::TensorMap query, key, value;  // [batch, heads, tokens, size]
  ScanArguments scan;                 // initial and final are of segments, not turned, where there are several
  int32_t segments;                   // of a sequence
  float* totals;                      // only_states: the sum of each segment's gates, in base 2
};

// Joins the segments of each head: what each begins with, and the final state.
struct JoinArguments {
  const float* initial;  // null: zeros
  float* final;          // null: not wanted
  const float *shares, *totals;
  float* starts;
  int32_t segments, columns, values;
  bool backwards, initial_is_turned, final_is_turned;
};
inline constexpr int kJoinThreads = 256;

}  // namespace kernel_pytorch::linear_attention
