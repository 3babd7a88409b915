// What host and device agree on for scans by chunks whose queries and keys (or values) a warpgroup of their own scales
// (split.cuh): configurations, shared memory, arguments.
#pragma once

#include "kernel_pytorch/ops/linear_attention/sm90/chunk_cuda.h"

namespace kernel_pytorch::linear_attention {

// What gates multiply: all of a state, its columns or its values.
enum class SplitGates { kScalar, kColumns, kValues };

struct SplitConfig {
  int columns = 128;   // of the state: 64 or 128; fewer are filled up with zeros
  int warpgroups = 2;  // that hold the state, kSm90Values values each
  SplitGates gates = SplitGates::kColumns;
  bool only_states = false;  // no queries and no output: the first pass over segments
};

KP_SHARED_CODE constexpr int split_stages(SplitConfig config) {
  return config.columns == 64 ? 4 : 3;
}
KP_SHARED_CODE constexpr int split_threads(SplitConfig config) {
  return 128 * (config.warpgroups + 2);
}
KP_SHARED_CODE constexpr int gated_channels(SplitConfig config) {
  return config.gates == SplitGates::kValues ? config.warpgroups * kSm90Values : config.columns;
}
KP_SHARED_CODE constexpr int split_rows_bytes(SplitConfig config) {  // of queries or keys of a stage
  return kSm90Chunk * config.columns * 2;
}
KP_SHARED_CODE constexpr int split_stage_bytes(SplitConfig config) {
  return (config.only_states ? 1 : 2) * split_rows_bytes(config) + config.warpgroups * values_bytes();
}
KP_SHARED_CODE constexpr int split_state_bytes(SplitConfig config) {  // rounded, of one warpgroup
  return config.columns * kSm90Values * 2;
}
// Of one warpgroup: its output, or fp32 factors of its output, whose place the output takes.
KP_SHARED_CODE constexpr int split_output_bytes(SplitConfig config) {
  return config.gates == SplitGates::kValues ? 2 * values_bytes() : values_bytes();
}
inline constexpr int kSplitSlots = 2;  // of scores
inline constexpr int kScoreBytes = kSm90Chunk * kSm90Chunk * 2;
// Stages, then a state for each warpgroup, then slots of scores, then outputs, then barriers and factors.
KP_SHARED_CODE constexpr int split_states_at(SplitConfig config) {
  return split_stages(config) * split_stage_bytes(config);
}
KP_SHARED_CODE constexpr int split_scores_at(SplitConfig config) {
  return split_states_at(config) + (config.only_states ? 0 : config.warpgroups * split_state_bytes(config));
}
KP_SHARED_CODE constexpr int split_outputs_at(SplitConfig config) {
  return split_scores_at(config) + (config.only_states ? 0 : kSplitSlots * kScoreBytes);
}
KP_SHARED_CODE constexpr int split_barriers_at(SplitConfig config) {
  return split_outputs_at(config) + (config.only_states ? 0 : config.warpgroups * split_output_bytes(config));
}
inline constexpr int kSplitSharedBytes = 3008;
KP_SHARED_CODE constexpr int split_shared_bytes(SplitConfig config) {
  return split_barriers_at(config) + kSplitSharedBytes;
}

// Joins the segments of each head whose states decay by column or by value.
struct SplitJoinArguments {
  JoinArguments join;  // totals: [heads, segments, columns or values]
  bool gates_values;
};

}  // namespace kernel_pytorch::linear_attention
