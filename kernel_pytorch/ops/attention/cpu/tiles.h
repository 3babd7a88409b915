// Words that the CPU kernels of attention share: rows and panels as fp32, the keys that a row sees, scores of a tile.
// For *_isa.cpp only.
#pragma once

#include "kernel_pytorch/cpu/columns.h"
#include "kernel_pytorch/cpu/tile_product.h"
#include "kernel_pytorch/cpu/vec_math.h"
#include "kernel_pytorch/ops/attention/cpu/kernels.h"

namespace kernel_pytorch::attention::KP_ISA_NAMESPACE {

using cpu::kLanes;
using cpu::kTileColumns;
using cpu::kTileRows;
using cpu::Vec;
using cpu::VecI;

constexpr float kMinusInfinity = -__builtin_inff();
// Rows of a tile of scores lie a line further apart than their length: else caches alias columns.
constexpr int64_t kScoreStride = kKeyTile + 16;
constexpr int64_t kBackwardStride = kBackwardKeyTile + 16;
static_assert(kKeyTile % kTileColumns == 0 && kKeyTile % kTileRows == 0 && kQueryTile % kTileRows == 0);
static_assert(kBackwardKeyTile % kTileColumns == 0 && kBackwardKeyTile % kTileRows == 0 &&
              kBackwardKeyTile <= kKeyTile);

KP_PRIMITIVE int64_t smaller(int64_t a, int64_t b) {
  return a < b ? a : b;
}
KP_PRIMITIVE int64_t larger(int64_t a, int64_t b) {
  return a > b ? a : b;
}
KP_PRIMITIVE int64_t round_up(int64_t value, int64_t step) {
  return (value + step - 1) / step * step;
}
KP_PRIMITIVE int64_t round_down(int64_t value, int64_t step) {
  return value / step * step;
}
KP_PRIMITIVE int64_t padded_size(int64_t size) {
  return round_up(size, kLanes);
}
// Vectors of a panel that begins at this column.
KP_PRIMITIVE int panel_vectors(int64_t size, int64_t first_column) {
  return static_cast<int>(smaller(kTileColumns, padded_size(size) - first_column) / kLanes);
}

// Calls body(T{}) for the element type: everything behind it computes in fp32.
template <class Body>
KP_PRIMITIVE void with_type(DType dtype, Body body) {
  if (dtype == DType::kBFloat16) {
    body(BFloat16{});
  } else if (dtype == DType::kFloat16) {
    body(Float16{});
  } else {
    body(float{});
  }
}

// Columns [begin, end) of a tile that any of several rows sees, by causality, window and length: both ends move with
// the query, so the first begins it and the last ends it.
struct Columns {
  int64_t begin, end;
};
KP_PRIMITIVE Columns columns_of_rows(const ScoreRules& rules, const Tile& tile, int64_t first_row, int64_t rows) {
  const int64_t first = tile.first_query + first_row + rules.offset, last = first + rows - 1;
  const int64_t begin = larger(tile.span->begin, first - rules.left) - tile.first_key;
  const int64_t end = smaller(smaller(tile.span->end, rules.keys), last + rules.right + 1) - tile.first_key;
  const Columns seen{larger(begin, 0), smaller(end, tile.columns)};
  return seen.begin < seen.end ? seen : Columns{0, 0};
}
KP_PRIMITIVE Columns columns_of_row(const ScoreRules& rules, const Tile& tile, int64_t row) {
  return columns_of_rows(rules, tile, row, 1);
}
KP_PRIMITIVE Columns columns_of_tile(const ScoreRules& rules, const Tile& tile) {
  return columns_of_rows(rules, tile, 0, tile.rows);
}

// Calls body(tile) for the tiles of keys that a block of queries sees.
template <class Body>
KP_PRIMITIVE void for_tiles(const ScoreRules& rules, const KeySpan* spans, int64_t span_count, int64_t first_query,
                            int64_t rows, int64_t columns, int64_t stride, Body body) {
  for (int64_t i = 0; i < span_count; ++i) {
    const Columns keys = columns_of_tile(rules, {spans + i, first_query, rows, 0, rules.keys, 0});
    for (int64_t key = round_down(keys.begin, columns); key < keys.end; key += columns) {
      body(Tile{spans + i, first_query, rows, key, columns, stride});
    }
  }
}

// Lane numbers from `first` on, to compare with a column.
KP_PRIMITIVE VecI lane_numbers(int64_t first) {
  VecI lane;
  for (int i = 0; i < kLanes; ++i) lane[i] = i;
  return lane + static_cast<int32_t>(first);
}

KP_PRIMITIVE HeadRows rows_from(DType dtype, const HeadRows& rows, int64_t first) {
  const int64_t bytes = dtype == DType::kFloat32 ? 4 : 2;
  return {static_cast<const char*>(rows.data) + first * rows.row_stride * bytes, rows.row_stride};
}

// Rows [first, first + rows) as fp32 times `factor`, `stride` floats apart, zeros behind `size` and behind the rows.
template <class T>
KP_PRIMITIVE void copy_rows(const HeadRows& from, int64_t first, int64_t rows, int64_t padded_rows, int64_t size,
                            float factor, float* to, int64_t stride) {
  for (int64_t i = 0; i < padded_rows; ++i) {
    float* row = to + i * stride;
    if (i < rows) {
      const T* source = static_cast<const T*>(from.data) + (first + i) * from.row_stride;
      cpu::for_columns<float>(
          size, [&](int64_t j, auto lanes) { cpu::store(row + j, cpu::load(source + j, lanes) * factor); });
    } else {
      for (int64_t j = 0; j < padded_size(size); j += kLanes) cpu::store(row + j, Vec{});
    }
  }
}

// Scores outside [seen) of the vectors that it touches count for nothing.
KP_PRIMITIVE void mask_edges(float* scores, Columns seen) {
  if (seen.begin % kLanes != 0) {
    float* first = scores + round_down(seen.begin, kLanes);
    const VecI is_seen = lane_numbers(round_down(seen.begin, kLanes)) >= static_cast<int32_t>(seen.begin);
    cpu::store(first, cpu::select(is_seen, cpu::load(first), cpu::broadcast(kMinusInfinity)));
  }
  if (seen.end % kLanes != 0) {
    float* last = scores + round_down(seen.end, kLanes);
    const VecI is_seen = lane_numbers(round_down(seen.end, kLanes)) < static_cast<int32_t>(seen.end);
    cpu::store(last, cpu::select(is_seen, cpu::load(last), cpu::broadcast(kMinusInfinity)));
  }
}

// tile = rows * panels^T, wherever a row of a register tile sees a key of it: scores, or the gradients of
// probabilities.
[[gnu::noinline, maybe_unused]] static void multiply_by_panels(const ScoreRules& rules, const Tile& tile,
                                                               const float* rows, int64_t row_stride, int64_t size,
                                                               const float* panels, float* scores) {
  const Columns seen = columns_of_tile(rules, tile);
  for (int64_t column = round_down(seen.begin, kTileColumns); column < seen.end; column += kTileColumns) {
    for (int64_t row = 0; row < tile.rows; row += kTileRows) {
      const Columns any = columns_of_rows(rules, tile, row, kTileRows);
      if (any.begin >= column + kTileColumns || any.end <= column) continue;
      cpu::multiply_tile<cpu::kTileVectors>({rows + row * row_stride, row_stride, 1},
                                            {panels + column * size, kTileColumns}, size,
                                            {scores + row * tile.stride + column, tile.stride}, false);
    }
  }
}

// sums += tile * rows: each row of a register tile's keys only. Columns that none of its rows sees must not matter,
// those that only some see must be zero in the others.
[[gnu::noinline, maybe_unused]] static void multiply_by_rows(const ScoreRules& rules, const Tile& tile,
                                                             const float* scores, const float* panels,
                                                             int64_t panel_rows, int64_t size, float* sums,
                                                             int64_t sum_stride) {
  for (int64_t column = 0; column < size; column += kTileColumns) {
    const int vectors = panel_vectors(size, column);
    const float* panel = panels + column * panel_rows;
    for (int64_t row = 0; row < tile.rows; row += kTileRows) {
      const Columns any = columns_of_rows(rules, tile, row, kTileRows);
      if (any.begin >= any.end) continue;
      cpu::multiply_tile(vectors, {scores + row * tile.stride + any.begin, tile.stride, 1},
                         {panel + any.begin * kTileColumns, kTileColumns}, any.end - any.begin,
                         {sums + row * sum_stride + column, sum_stride}, true);
    }
  }
}

// Adds a row of `share` * sums and lse to what other keys gave, whose lse is not -inf.
KP_PRIMITIVE void add_row(const ForwardTask& task, int64_t query, float lse, float others, float share,
                          const float* sums) {
  const float base = lse > others ? lse : others;
  const float of_these = cpu::exp(cpu::broadcast(lse - base))[0],
              of_others = cpu::exp(cpu::broadcast(others - base))[0];
  const float both = of_these + of_others;
  task.lse[query] = base + cpu::log(cpu::broadcast(both))[0];
  const float factor = share * (of_these / both), keep = of_others / both;
  float* output = static_cast<float*>(task.output) + query * task.output_row_stride;
  cpu::for_columns<float>(task.rules->value_size, [&](int64_t j, auto lanes) {
    cpu::store(output + j, cpu::load(output + j, lanes) * keep + cpu::load(sums + j) * factor, lanes);
  });
}

// Ends a row: its output and lse, from the sum of powers relative to `most` (in units of log 2) and that of the values.
KP_PRIMITIVE void finish_row(const ForwardTask& task, int64_t row, float most, float total, const float* sums) {
  const ScoreRules& rules = *task.rules;
  float lse = most * kLn2 + cpu::log(cpu::broadcast(total))[0];
  float share = 1.0f / total;
  if (!(total > 0) && total == total) {  // nothing seen
    share = 0;
    lse = kMinusInfinity;
  }
  if (rules.has_sink) {
    // log(e^lse + e^sink), and the share of what was seen in it.
    const float larger_one = lse > rules.sink ? lse : rules.sink;
    const float base = larger_one == kMinusInfinity ? 0.0f : larger_one;
    const float seen = cpu::exp(cpu::broadcast(lse - base))[0];
    const float both = seen + cpu::exp(cpu::broadcast(rules.sink - base))[0];
    if (both != 0) {  // a sink of NaN stays NaN
      share *= seen / both;
      lse = base + cpu::log(cpu::broadcast(both))[0];
    }
  }
  const int64_t query = task.first_query + row;
  const float others = task.accumulate ? task.lse[query] : kMinusInfinity;
  if (others != kMinusInfinity) {
    add_row(task, query, lse, others, share, sums);
    return;
  }
  if (task.lse != nullptr) task.lse[query] = lse;
  with_type(task.output_dtype, [&](auto type) {
    using T = decltype(type);
    T* output = static_cast<T*>(task.output) + query * task.output_row_stride;
    cpu::for_columns<float>(rules.value_size,
                            [&](int64_t j, auto lanes) { cpu::store(output + j, cpu::load(sums + j) * share, lanes); });
  });
}

// Computes delta of a task's rows, and their lse in base 2 (inf for a row that sees no key); `gradient` has been loaded
// as fp32.
template <class T>
KP_PRIMITIVE void load_statistics(const BackwardTask& task, int64_t padded_rows, float* delta, float* lse) {
  for (int64_t row = 0; row < padded_rows; ++row) {
    delta[row] = 0;
    lse[row] = __builtin_inff();
    if (row >= task.rows) continue;
    const int64_t query = task.first_query + row;
    const T* output = static_cast<const T*>(task.output.data) + query * task.output.row_stride;
    const T* gradient = static_cast<const T*>(task.grad_output.data) + query * task.grad_output.row_stride;
    Vec sum{};
    cpu::for_columns<float>(task.rules->value_size, [&](int64_t j, auto lanes) {
      sum += cpu::load(output + j, lanes) * cpu::load(gradient + j, lanes);
    });
    delta[row] = cpu::horizontal_sum(sum) - (task.grad_lse == nullptr ? 0.0f : task.grad_lse[query]);
    // By a double: the rounding of kLog2E would shift every probability of a long row the same way.
    if (task.lse[query] != kMinusInfinity) lse[row] = static_cast<float>(task.lse[query] * 1.4426950408889634);
  }
}

KP_PRIMITIVE bool needs_unwinding(const BackwardTask& task) {
  const ScoreRules& rules = *task.rules;
  return task.grad_bias != nullptr || rules.softcap > 0 ||
         (rules.programs != nullptr && rules.programs->changes_scores);
}

KP_PRIMITIVE void sum_sink(const BackwardTask& task, const float* delta) {
  float sum = 0;
  for (int64_t row = 0; row < task.rows; ++row) {
    const float lse = task.lse[task.first_query + row];
    if (lse != kMinusInfinity) sum += cpu::exp(cpu::broadcast(task.rules->sink - lse))[0] * delta[row];
  }
  *task.sink_sum = sum;
}

// The gradient of the queries, from its sums.
KP_PRIMITIVE void write_grad_query(const BackwardTask& task, const float* sums, int64_t stride) {
  with_type(task.grad_dtype, [&](auto type) {
    using T = decltype(type);
    for (int64_t row = 0; row < task.rows; ++row) {
      T* to = static_cast<T*>(task.grad_query) + (task.first_query + row) * task.grad_query_row_stride;
      cpu::for_columns<float>(task.rules->size, [&](int64_t j, auto lanes) {
        Vec sum = cpu::load(sums + row * stride + j) * task.rules->scale;
        if (task.accumulate) sum += cpu::load(to + j, lanes);
        cpu::store(to + j, sum, lanes);
      });
    }
  });
}

void pack_transposed(const PackTask& task);
void pack_rows(const PackTask& task);
int64_t forward_buffer_floats(int64_t size, int64_t value_size);
void forward(const ForwardTask& task);
int64_t backward_buffer_floats(int64_t size, int64_t value_size);
void backward(const BackwardTask& task);

extern const TileRules kTileRules;

}  // namespace kernel_pytorch::attention::KP_ISA_NAMESPACE
