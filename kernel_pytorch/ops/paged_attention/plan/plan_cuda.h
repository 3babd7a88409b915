// What host and device agree on for plan_decode: the numbers of a plan, and how many units a request has.
//
// A plan is int32: a header, then for each request the number of its first unit, then that of all. A unit is
// `unit_keys` keys of one tile of rows (queries times the heads that share a key) of `tile_heads` key heads.
#pragma once

#include "kernel_pytorch/base/fixed_width.h"

namespace kernel_pytorch::paged_attention {

inline constexpr int32_t kPlanVersion = 1;
enum PlanNumber {
  kPlanAtVersion,
  kPlanAtRequests,
  kPlanAtGroup,
  kPlanAtKeyHeads,
  kPlanAtUnitKeys,
  kPlanAtTileRows,
  kPlanAtTileHeads,
  kPlanAtUnits,
  kPlanHeader
};

// Windows are at most 2^30, or that where they are unbounded; causal is a right side of 0.
struct PlanShape {
  int64_t group, key_heads;  // query heads of a key head
  int64_t unit_keys, tile_rows, tile_heads;
  int64_t window_left, window_right;
  int64_t most_keys;  // of a request
};

KP_SHARED_CODE inline int64_t plan_units(const PlanShape& shape, int64_t queries, int64_t keys) {
  const int64_t row_tiles = (queries * shape.group + shape.tile_rows - 1) / shape.tile_rows;
  const int64_t head_groups = (shape.key_heads + shape.tile_heads - 1) / shape.tile_heads;
  // No tile of rows sees more keys than the windows of its first and last query.
  const int64_t tile_queries = (shape.tile_rows - 1) / shape.group + 1;
  const int64_t seen = shape.window_left + shape.window_right + tile_queries + 1 + shape.unit_keys;
  keys = keys < 0 ? 0 : keys > shape.most_keys ? shape.most_keys : keys;
  keys = keys < seen ? keys : seen;
  const int64_t units = (keys + shape.unit_keys - 1) / shape.unit_keys;
  return row_tiles * head_groups * (units > 0 ? units : 1);
}

// Of more units than int32 has, plans say that.
KP_SHARED_CODE inline int32_t plan_number(int64_t units) {
  constexpr int32_t kMost = 0x7fffffff;
  return units < kMost ? static_cast<int32_t>(units) : kMost;
}

struct PlanArguments {
  PlanShape shape;
  const int32_t* seq_lens;
  const int32_t* cu_seqlens_q;  // null: `queries` each
  int64_t requests, queries;
  int32_t* plan;
  int64_t capacity;
};
inline constexpr int kPlanThreads = 1024;

}  // namespace kernel_pytorch::paged_attention
