// What host and device agree on: the arguments of the kernels, and what a row of blocks sees, must keep and may keep.
#pragma once

#include "kernel_pytorch/base/fixed_width.h"

namespace kernel_pytorch::block_list {

inline constexpr int kThreads = 128;
inline constexpr int kWarps = kThreads / 32;
inline constexpr uint8_t kEmpty = 0, kPartial = 1, kFull = 2;

// Lists of one direction; null where not wanted.
struct Side {
  int32_t* counts;
  int32_t* blocks;
  int32_t* full_counts;
  int32_t* full_blocks;
  int32_t lists;      // of a head
  int32_t length;     // of a list's memory
  int64_t list_step;  // in the map, from list to list
  int64_t step;       // from entry to entry
};

struct BuildArguments {
  const uint8_t* map;
  int64_t head_step;  // in the map
  int64_t row_lists, column_lists;
  Side rows, columns;
};

// Where a selection's rows and columns stand, and how many blocks a row keeps.
struct Grid {
  int64_t queries, keys;  // tokens
  int64_t offset;         // the place among the keys of query 0
  int32_t rows, columns;  // blocks
  int32_t query_block, key_block;
  int32_t sinks, local;
  int32_t keep, extra_from;  // of each row; one more from row extra_from on
  bool causal;
};

// Columns [0, visible) may be kept, [0, sinks) and [local_begin, local_end) must be, `picked` more are by their scores.
struct Row {
  int32_t visible, sinks, local_begin, local_end, picked;

  KP_SHARED_CODE constexpr bool is_kept_always(int32_t column) const {
    return column < sinks || (column >= local_begin && column < local_end);
  }
  KP_SHARED_CODE constexpr int32_t kept_always() const { return sinks + (local_end - local_begin); }
  KP_SHARED_CODE constexpr int32_t kept() const { return kept_always() + picked; }
};

KP_SHARED_CODE constexpr int32_t clamp_column(int64_t column, int32_t low, int32_t high) {
  return column < low ? low : column > high ? high : static_cast<int32_t>(column);
}

// The column of a place among the keys, rounded down below 0 too.
KP_SHARED_CODE constexpr int64_t column_of(const Grid& grid, int64_t place) {
  return (place >= 0 ? place : place - grid.key_block + 1) / grid.key_block;
}

KP_SHARED_CODE constexpr Row row_of(const Grid& grid, int32_t row) {
  const int64_t first = static_cast<int64_t>(row) * grid.query_block;
  const int64_t end = first + grid.query_block < grid.queries ? first + grid.query_block : grid.queries;
  const int64_t diagonal_begin = column_of(grid, first + grid.offset);
  const int64_t diagonal_end = column_of(grid, end - 1 + grid.offset) + 1;
  Row result{};
  result.visible = grid.causal ? clamp_column(diagonal_end, 0, grid.columns) : grid.columns;
  result.sinks = grid.sinks < result.visible ? grid.sinks : result.visible;
  // What the sinks have is not counted twice.
  result.local_begin = clamp_column(diagonal_begin - grid.local, result.sinks, result.visible);
  result.local_end = clamp_column(diagonal_end + grid.local, result.local_begin, result.visible);
  const int32_t share = grid.keep + (row >= grid.extra_from ? 1 : 0);
  const int32_t most = share < result.visible ? share : result.visible;
  result.picked = most > result.kept_always() ? most - result.kept_always() : 0;
  return result;
}

inline constexpr int kSelectRows = kWarps;  // of a block: each warp ends with one

struct SelectArguments {
  Grid grid;
  const void* query;  // null: scores are given
  const void* key;
  const float* scores;
  int64_t query_batch, query_head, query_row;  // strides in elements
  int64_t key_batch, key_head, key_row;
  int64_t scores_batch, scores_head, scores_row, scores_column;
  float threshold;
  bool has_threshold;
  int32_t size, parts, key_parts;  // parts: of all keys; key_parts: of a column
  int32_t heads, group, row_groups;
  int32_t* counts;
  int32_t* blocks;
  uint8_t* map;  // or null
};

// Scores that sort as unsigned numbers do. 0 is none at all, NaN is 1, below all others.
inline constexpr uint32_t kNoScore = 0, kNanScore = 1;

}  // namespace kernel_pytorch::block_list
