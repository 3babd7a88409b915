// Forward on tiles: scores of a block of queries and a tile of keys, one step of the online softmax, and the product
// with the values. Everything between the products happens on the tile of scores in the nearest caches; causality and
// windows drop whole register tiles, and of the second product also single keys.
#include "kernel_pytorch/ops/attention/cpu/tiles.h"

namespace kernel_pytorch::attention::KP_ISA_NAMESPACE {
namespace {

// What a block of queries keeps while it walks over the keys.
struct Block {
  float* query;   // [rows][padded size], scaled
  float* scores;  // [rows][kScoreStride]
  float* sums;    // [rows][padded value size]
  float* most;    // [rows]: largest score so far
  float* total;   // [rows][kLanes]: sums of powers by lane
  float* keys;    // panels of one tile, where the task packs
  float* values;
  int64_t query_stride, sum_stride;
  int64_t rows, padded_rows;
};

Block make_block(const ForwardTask& task) {
  const ScoreRules& rules = *task.rules;
  Block block{};
  block.rows = task.rows;
  block.padded_rows = round_up(task.rows, kTileRows);
  block.query_stride = padded_size(rules.size);
  block.sum_stride = padded_size(rules.value_size);
  float* next = task.buffer;
  const auto take = [&](int64_t floats) {
    float* taken = next;
    next += floats;
    return taken;
  };
  block.scores = take(kQueryTile * kScoreStride);
  block.query = take(kQueryTile * block.query_stride);
  block.sums = take(kQueryTile * block.sum_stride);
  block.total = take(kQueryTile * kLanes);
  block.keys = take(kKeyTile * rules.size);
  block.values = take(kKeyTile * round_up(rules.value_size, kTileColumns));
  block.most = take(kQueryTile);
  // With nothing else to do to them, scores are in units of log 2 from the start.
  const float factor = rules.adjusts ? rules.scale : rules.scale * kLog2E;
  with_type(rules.dtype, [&](auto type) {
    copy_rows<decltype(type)>(task.query, task.first_query, task.rows, block.padded_rows, rules.size, factor,
                              block.query, block.query_stride);
  });
  for (int64_t i = 0; i < block.padded_rows * block.sum_stride; i += kLanes) cpu::store(block.sums + i, Vec{});
  for (int64_t i = 0; i < block.padded_rows * kLanes; i += kLanes) cpu::store(block.total + i, Vec{});
  for (int64_t i = 0; i < block.padded_rows; ++i) block.most[i] = kMinusInfinity;
  return block;
}

// Scores [begin, end) of a row, whole vectors, to powers relative to the largest so far; what was added up before is
// scaled when that grows.
KP_PRIMITIVE void softmax_row(const Block& block, int64_t row, float* scores, int64_t begin, int64_t end) {
  Vec most[2] = {cpu::broadcast(kMinusInfinity), cpu::broadcast(kMinusInfinity)};
  int64_t j = begin;
  for (; j + 2 * kLanes <= end; j += 2 * kLanes) {
    most[0] = cpu::max(cpu::load(scores + j), most[0]);
    most[1] = cpu::max(cpu::load(scores + j + kLanes), most[1]);
  }
  if (j < end) most[0] = cpu::max(cpu::load(scores + j), most[0]);
  const float before = block.most[row];
  const float tile_most = cpu::horizontal_max(cpu::max(most[0], most[1]));
  const float now = tile_most > before ? tile_most : before;
  // With -inf everywhere a difference would be NaN; any finite number gives the zeros that are meant.
  const float reference = now == kMinusInfinity ? 0.0f : now;
  Vec total = cpu::load(block.total + row * kLanes);
  if (now > before) {
    const Vec shrink = cpu::exp2_fast(cpu::broadcast(before - reference));
    total *= shrink;
    block.most[row] = now;
    if (before != kMinusInfinity) {
      float* sums = block.sums + row * block.sum_stride;
      for (int64_t i = 0; i < block.sum_stride; i += kLanes) cpu::store(sums + i, cpu::load(sums + i) * shrink);
    }
  }
  for (j = begin; j < end; j += kLanes) {
    const Vec power = cpu::exp2_fast(cpu::load(scores + j) - reference);
    cpu::store(scores + j, power);
    total += power;
  }
  cpu::store(block.total + row * kLanes, total);
}

void softmax_tile(const ScoreRules& rules, const Block& block, const Tile& tile) {
  for (int64_t group = 0; group < tile.rows; group += kTileRows) {
    const Columns any = columns_of_rows(rules, tile, group, kTileRows);
    const int64_t any_begin = round_down(any.begin, kLanes), any_end = round_up(any.end, kLanes);
    for (int64_t row = group; row < smaller(group + kTileRows, tile.rows); ++row) {
      float* scores = block.scores + row * kScoreStride;
      const Columns seen = columns_of_row(rules, tile, row);
      int64_t begin = round_down(seen.begin, kLanes), end = round_up(seen.end, kLanes);
      if (seen.begin < seen.end) {
        mask_edges(scores, seen);
        softmax_row(block, row, scores, begin, end);
      } else {
        begin = end = any_end;
      }
      for (int64_t j = any_begin; j < begin; j += kLanes) cpu::store(scores + j, Vec{});
      for (int64_t j = end; j < any_end; j += kLanes) cpu::store(scores + j, Vec{});
    }
  }
}

// Panels of the tile's keys: those packed for all, or packed here.
PackedKeys panels_of_tile(const ForwardTask& task, const Block& block, const Tile& tile) {
  const ScoreRules& rules = *task.rules;
  if (task.packed != nullptr) {
    PackedKeys panels = *task.packed;
    panels.transposed_keys += tile.first_key * rules.size;
    panels.rows += tile.first_key * kTileColumns;
    return panels;
  }
  const int64_t count = smaller(rules.keys - tile.first_key, tile.columns);
  const HeadRows key = rows_from(rules.dtype, task.key, tile.first_key);
  const HeadRows value = rows_from(rules.dtype, task.value, tile.first_key);
  pack_transposed({rules.dtype, key, 0, count, rules.size, block.keys, kKeyTile});
  pack_rows({rules.dtype, value, 0, count, rules.value_size, block.values, kKeyTile});
  return {.transposed_keys = block.keys, .rows = block.values, .padded_keys = kKeyTile};
}

}  // namespace

int64_t forward_buffer_floats(int64_t size, int64_t value_size) {
  const int64_t own = padded_size(size) + kScoreStride + padded_size(value_size) + 1 + kLanes;
  const int64_t panels = kKeyTile * (size + round_up(value_size, kTileColumns));
  return round_up(kQueryTile * own + panels, 64);
}

void forward(const ForwardTask& task) {
  const ScoreRules& rules = *task.rules;
  const Block block = make_block(task);
  for_tiles(rules, task.spans, task.span_count, task.first_query, task.rows, kKeyTile, kScoreStride,
            [&](const Tile& tile) {
              const PackedKeys panels = panels_of_tile(task, block, tile);
              multiply_by_panels(rules, tile, block.query, block.query_stride, rules.size, panels.transposed_keys,
                                 block.scores);
              if (rules.adjusts) kTileRules.adjust(rules, tile, block.scores, nullptr, nullptr);
              softmax_tile(rules, block, tile);
              if (rules.dropout_threshold != 0) kTileRules.drop(rules, tile, block.scores);
              multiply_by_rows(rules, tile, block.scores, panels.rows, panels.padded_keys, rules.value_size, block.sums,
                               block.sum_stride);
            });
  for (int64_t row = 0; row < task.rows; ++row) {
    finish_row(task, row, block.most[row], cpu::horizontal_sum(cpu::load(block.total + row * kLanes)),
               block.sums + row * block.sum_stride);
  }
}

}  // namespace kernel_pytorch::attention::KP_ISA_NAMESPACE
