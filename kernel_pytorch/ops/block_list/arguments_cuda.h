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

// The largest number in [low, high] for which `fits` holds, which holds for all below it too; low where none does.
template <class Fits>
KP_SHARED_CODE constexpr int32_t largest_that(int32_t low, int32_t high, const Fits& fits) {
  while (low < high) {
    const int32_t middle = high - (high - low) / 2;
    if (fits(middle)) {
      low = middle;
    } else {
      high = middle - 1;
    }
  }
  return low;
}

// Sets grid.keep and grid.extra_from. sum_rows(of) is the sum over all rows of of(row).
template <class SumRows>
KP_SHARED_CODE constexpr void choose_share(Grid& grid, double sparsity, const SumRows& sum_rows) {
  const int64_t seen = sum_rows([&](const Row& row) { return row.visible; });
  const auto wanted = static_cast<int64_t>((1 - sparsity) * static_cast<double>(seen) + 1e-6);
  const auto fits = [&] { return sum_rows([&](const Row& row) { return row.kept(); }) <= wanted; };
  grid.extra_from = grid.rows;
  const int32_t keep = largest_that(0, grid.columns, [&](int32_t number) {
    grid.keep = number;
    return fits();
  });
  grid.keep = keep;
  if (keep == grid.columns) return;
  const int32_t extra = largest_that(0, grid.rows, [&](int32_t rows) {
    grid.extra_from = grid.rows - rows;
    return fits();
  });
  grid.extra_from = grid.rows - extra;
}

// The grid of an entry of so many queries and keys, without its share.
KP_SHARED_CODE constexpr Grid grid_of_lengths(Grid grid, int64_t queries, int64_t keys, bool is_aligned) {
  grid.queries = queries < 0 ? 0 : queries < grid.queries ? queries : grid.queries;
  grid.keys = keys < 0 ? 0 : keys < grid.keys ? keys : grid.keys;
  if (is_aligned) grid.offset = grid.keys - grid.queries;
  grid.rows = static_cast<int32_t>((grid.queries + grid.query_block - 1) / grid.query_block);
  grid.columns = static_cast<int32_t>((grid.keys + grid.key_block - 1) / grid.key_block);
  return grid;
}

// Key parts over all keys; the last column may have fewer.
KP_SHARED_CODE constexpr int64_t parts_of(const Grid& grid, int64_t key_parts) {
  const int64_t part = grid.key_block / key_parts;
  return (grid.keys + part - 1) / part;
}

// Computes the grids of batch entries with lengths, one warp per entry.
struct GridsArguments {
  Grid grid;  // of the longest
  const int32_t* query_lengths;
  const int32_t* key_lengths;
  Grid* grids;
  bool is_aligned;  // at the end; else grid.offset
  double sparsity;
};

inline constexpr int kSelectRows = kWarps;  // of a block: each warp ends with one

struct SelectArguments {
  Grid grid;
  const Grid* grids;  // of each entry of the batch, or null: all have this one
  const void* query;  // null: scores are given
  const void* key;
  const float* scores;
  int64_t query_batch, query_head, query_row;  // strides in elements
  int64_t key_batch, key_head, key_row;
  int64_t scores_batch, scores_head, scores_row, scores_column;
  float threshold;
  bool has_threshold;
  int32_t size, key_parts;  // key_parts: of a column
  int32_t heads, group, row_groups;
  int32_t* counts;
  int32_t* blocks;
  uint8_t* map;  // or null
};

// Scores that sort as unsigned numbers do. 0 is none at all, NaN is 1, below all others.
inline constexpr uint32_t kNoScore = 0, kNanScore = 1;

}  // namespace kernel_pytorch::block_list
