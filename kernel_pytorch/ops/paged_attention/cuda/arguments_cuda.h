// What host and device agree on for paged attention: tiles, arguments, and how keys are shared out among workers.
#pragma once

#include "kernel_pytorch/base/fixed_width.h"
#include "kernel_pytorch/ops/support/divider_cuda.h"

namespace kernel_pytorch::paged_attention {

struct CacheArguments {
  const void* data;
  int64_t page_stride, row_stride, head_stride;  // elements
  const float* scales;                           // null: 1
  int64_t scale_page_stride, scale_row_stride, scale_head_stride;
};

// window_left and window_right are at most 2^30, or that where they are unbounded.
struct AttendArguments {
  const void* query;
  int64_t query_token_stride, query_head_stride;
  CacheArguments key, value;
  const int32_t* block_tables;
  const int32_t* seq_lens;      // null: all that the table names
  const int32_t* cu_seqlens_q;  // null: queries_each
  const uint8_t* mask;          // null: none
  int64_t mask_request_stride, mask_query_stride, mask_key_stride;
  const float* sinks;         // null: none
  const float* alibi_slopes;  // null: none
  void* output;
  int64_t output_token_stride, output_head_stride;
  float* lse;  // null: not wanted
  float scale, softcap;
  int32_t tokens, heads, size, value_size;
  int32_t requests, table, queries_each;
  int32_t pages, page_size;
  Divider page_divider, group_divider;  // by page_size, by heads of query per key head
  int32_t key_heads;
  int32_t window_left, window_right;
  bool causal;
};

struct RowsArguments {
  const void* data;
  int64_t token_stride, head_stride;
  int32_t size;
};
// Tables of a rotation, or null: row `positions[token]`, or that of the token's number, elements from pair to pair.
struct RotationArguments {
  const void* cos;
  const void* sin;
  const void* positions;
  int64_t cos_stride, sin_stride;
  int64_t rows;
  int32_t pairs, cos_step, sin_step;
  bool is_float, interleaved, positions_are_wide;
};
struct AppendArguments {
  RowsArguments new_key, new_value;
  CacheArguments key, value;
  RotationArguments rotation;
  const void* slots;
  int64_t tokens, key_heads, page_size, slot_count;
  bool slots_are_wide;
};

// A tile of the kernels by tensor cores: `rows` for each of row_warps. `warps` multiply; those that have their head and
// their rows in common with another share out the keys of a step.
struct Tile {
  int32_t size, value_size;
  int32_t row_warps;
  int32_t keys = 0;    // of a step
  int32_t stages = 0;  // of keys and values under way
  int32_t bytes;       // of a number in the cache
  int32_t heads = 1;   // key heads of a block
  int32_t warps = 4;
  int32_t rows = 16;  // of a warp
};
inline constexpr int kThreads = 128;
inline constexpr int kWarps = kThreads / 32;
inline constexpr int kCombineThreads = 512;

KP_SHARED_CODE constexpr int tile_rows(const Tile& tile) {
  return tile.rows * tile.row_warps;
}
KP_SHARED_CODE constexpr int team_count(const Tile& tile) {
  return kWarps / tile.row_warps;
}
KP_SHARED_CODE constexpr int team_keys(const Tile& tile) {
  return tile.keys / team_count(tile);
}
// Rows of shared memory are 16 bytes longer than their numbers, so that eight of them meet all banks.
KP_SHARED_CODE constexpr int key_pitch(const Tile& tile) {
  return tile.size * tile.bytes + 16;
}
KP_SHARED_CODE constexpr int value_pitch(const Tile& tile) {
  return tile.value_size * tile.bytes + 16;
}
KP_SHARED_CODE constexpr int query_pitch(const Tile& tile) {
  return tile.size * 2 + 16;
}
// A team's keys and values of one step.
KP_SHARED_CODE constexpr int stage_bytes(const Tile& tile) {
  return team_keys(tile) * (key_pitch(tile) + value_pitch(tile));
}
KP_SHARED_CODE constexpr int slot_count(const Tile& tile) {
  return tile.stages + 1;
}
// Of each key of a team's step: where its row and its value's begin, their scales, and a bit that says whether it is
// there.
KP_SHARED_CODE constexpr int slot_bytes(const Tile& tile) {
  return team_keys(tile) * (8 + 8 + 4 + 4) + 16;
}
KP_SHARED_CODE constexpr int result_bytes(const Tile& tile) {
  return kWarps * 16 * (tile.value_size + 4 + 2) * 4;
}
KP_SHARED_CODE constexpr int shared_bytes(const Tile& tile) {
  const int stages = team_count(tile) * tile.stages * stage_bytes(tile), result = result_bytes(tile);
  return tile_rows(tile) * query_pitch(tile) + team_count(tile) * slot_count(tile) * slot_bytes(tile) +
         (stages > result ? stages : result);
}

// The kernel of sm_90 keeps a key's rows of all heads of the block next to each other, as pages of most caches do.
KP_SHARED_CODE constexpr int slice_count(const Tile& tile) {
  return tile.warps / (tile.heads * tile.row_warps);
}
KP_SHARED_CODE constexpr int warp_keys(const Tile& tile) {
  return tile.keys / slice_count(tile);
}
KP_SHARED_CODE constexpr int heads_key_pitch(const Tile& tile) {
  return tile.heads * tile.size * tile.bytes + 16;
}
KP_SHARED_CODE constexpr int heads_value_pitch(const Tile& tile) {
  return tile.heads * tile.value_size * tile.bytes + 16;
}
KP_SHARED_CODE constexpr int heads_rows_bytes(const Tile& tile) {
  return tile.keys * (heads_key_pitch(tile) + heads_value_pitch(tile));
}
KP_SHARED_CODE constexpr int heads_scale_bytes(const Tile& tile) {
  return tile.bytes == 1 ? tile.keys * tile.heads * 4 : 0;
}
// Keys, values, their scales, and of each key whether it is there.
KP_SHARED_CODE constexpr int heads_stage_bytes(const Tile& tile) {
  return heads_rows_bytes(tile) + 2 * heads_scale_bytes(tile) + tile.keys;
}
inline constexpr int kCopyWarps = 4;
inline constexpr int kMostStages = 8;
inline constexpr int kSharedRequests = 1024;  // whose plan a block makes for itself
// Warps that share out keys leave their results in a stage.
KP_SHARED_CODE constexpr int result_pitch(const Tile& tile) {
  return tile.value_size + 4;
}
KP_SHARED_CODE constexpr int heads_result_bytes(const Tile& tile) {
  return slice_count(tile) == 1 ? 0 : tile.warps * tile.rows * (result_pitch(tile) + 2) * 4;
}
KP_SHARED_CODE constexpr int heads_shared_bytes(const Tile& tile) {
  return 2 * kMostStages * 8 + (kSharedRequests + 8) * 8 + 2 * tile.keys * 8 + tile.stages * heads_stage_bytes(tile);
}

// Latent rows (MLA): value_size columns that are keys and values, and the rope columns of the keys.
KP_SHARED_CODE constexpr int latent_pitch(const Tile& tile) {
  return tile.value_size * tile.bytes + 16;
}
KP_SHARED_CODE constexpr int rope_pitch(const Tile& tile) {
  return (tile.size - tile.value_size) * 2 + 16;
}
// Scales of a key, and weights that they are put into: one for each 128 columns.
KP_SHARED_CODE constexpr int latent_copies(const Tile& tile) {
  return tile.bytes == 1 ? tile.value_size / 128 : 1;
}
KP_SHARED_CODE constexpr int latent_stage_bytes(const Tile& tile) {
  return tile.keys * (latent_pitch(tile) + rope_pitch(tile) + (tile.bytes == 1 ? latent_copies(tile) * 4 : 0));
}
KP_SHARED_CODE constexpr int latent_shared_bytes(const Tile& tile) {
  const int rows = tile_rows(tile), splits = tile.warps * 8 / tile.keys;
  return tile.stages * latent_stage_bytes(tile) + rows * query_pitch(tile) + splits * rows * (tile.keys + 8) * 4 +
         latent_copies(tile) * rows * (tile.keys * 2 + 16) + rows * 3 * 4 + (tile.stages + 1) * tile.keys * (2 * 8 + 4);
}
// Blocks of a multiprocessor.
KP_SHARED_CODE constexpr int latent_blocks(const Tile& tile) {
  return tile.row_warps <= 2 && 2 * latent_shared_bytes(tile) <= 226 * 1024 ? 2 : 1;
}

// Work is counted in units: `unit_tiles` steps of keys for one tile of rows of the key heads of a
// block. The units of all requests stand in a row, ordered by request, tile of rows, key heads and keys; plan[r] is the
// number of the first unit of request r, plan[requests] that of all. A worker takes the units from worker * units /
// workers on (fill), or exactly one (invariant: there are as many workers as units). The units of one tile of rows and
// key head are a segment; where a segment is cut, its pieces are kept as sums and combined in order.
struct WorkArguments {
  AttendArguments attend;
  int64_t* plan = nullptr;  // null: blocks make it for themselves
  float* partial =
      nullptr;  // [workers * slots][heads * rows][value_size + 2]: sums of values, then largest and sum of exponentials
  int32_t workers = 0;  // 0: one for each unit
  int32_t unit_tiles = 1;
  bool has_runs = false;  // sm_90: a key's rows of a block's heads are one run of bytes, in both caches
};

}  // namespace kernel_pytorch::paged_attention
