// Backward on tiles, one pass of five products: scores and gradients of probabilities of a tile, then from their
// elementwise product the gradients of queries (kept here), keys and values (added to panels that only this thread
// writes). The tile is [query][key] as in forward, and its transpose, which keys and values need, is a matter of
// strides.
#include "kernel_pytorch/ops/attention/cpu/tiles.h"

namespace kernel_pytorch::attention::KP_ISA_NAMESPACE {
namespace {

struct Block {
  float* query;         // [rows][padded size], scaled for the scores
  float* query_panels;  // [panel][rows][kTileColumns], scaled for the gradient of keys
  float* grad_output;   // [rows][padded value size]
  float* grad_output_panels;
  float* scores;           // [rows][kBackwardStride]: then probabilities
  float* gradients;        // likewise: of probabilities, then of scores
  float* before;           // scores that a program changed
  float* slopes;           // of softcap
  float* grad_query;       // [rows][padded size]
  float* lse;              // [rows], in units of log 2; inf where nothing was seen
  float* delta;            // [rows]
  float* transposed_keys;  // panels of one tile, where the task packs
  float* transposed_values;
  int64_t stride, value_stride;  // of rows
};

Block lay_out(float* buffer, int64_t size, int64_t value_size, int64_t& floats) {
  float* next = buffer;
  const auto take = [&](int64_t count) {
    float* taken = next;
    next += round_up(count, 16);
    return taken;
  };
  Block block{};
  block.stride = padded_size(size);
  block.value_stride = padded_size(value_size);
  block.scores = take(kQueryTile * kBackwardStride);
  block.gradients = take(kQueryTile * kBackwardStride);
  block.query = take(kQueryTile * block.stride);
  block.query_panels = take(kQueryTile * round_up(size, kTileColumns));
  block.grad_output = take(kQueryTile * block.value_stride);
  block.grad_output_panels = take(kQueryTile * round_up(value_size, kTileColumns));
  block.grad_query = take(kQueryTile * block.stride);
  block.lse = take(kQueryTile);
  block.delta = take(kQueryTile);
  block.transposed_keys = take(kBackwardKeyTile * size);
  block.transposed_values = take(kBackwardKeyTile * value_size);
  block.slopes = take(kQueryTile * kBackwardStride);
  block.before = take(kQueryTile * kBackwardStride);
  floats = next - buffer;
  return block;
}

template <class T>
void load_queries(const BackwardTask& task, const Block& block) {
  const ScoreRules& rules = *task.rules;
  const int64_t padded_rows = round_up(task.rows, kTileRows);
  const float factor = rules.adjusts ? rules.scale : rules.scale * kLog2E;
  copy_rows<T>(task.query, task.first_query, task.rows, padded_rows, rules.size, factor, block.query, block.stride);
  copy_rows<T>(task.grad_output, task.first_query, task.rows, padded_rows, rules.value_size, 1.0f, block.grad_output,
               block.value_stride);
  for (int64_t column = 0; column < rules.size; column += kTileColumns) {
    const HeadRows rows{static_cast<const T*>(task.query.data) + column, task.query.row_stride};
    copy_rows<T>(rows, task.first_query, task.rows, task.rows, smaller(kTileColumns, rules.size - column), 1.0f,
                 block.query_panels + column * kQueryTile, kTileColumns);
  }
  for (int64_t column = 0; column < rules.value_size; column += kTileColumns) {
    const HeadRows rows{static_cast<const T*>(task.grad_output.data) + column, task.grad_output.row_stride};
    copy_rows<T>(rows, task.first_query, task.rows, task.rows, smaller(kTileColumns, rules.value_size - column), 1.0f,
                 block.grad_output_panels + column * kQueryTile, kTileColumns);
  }
  load_statistics<T>(task, task.rows, block.delta, block.lse);
}

PackedKeys panels_of_tile(const BackwardTask& task, const Block& block, const Tile& tile) {
  const ScoreRules& rules = *task.rules;
  if (task.packed != nullptr) {
    PackedKeys panels = *task.packed;
    panels.transposed_keys += tile.first_key * rules.size;
    panels.transposed_values += tile.first_key * rules.value_size;
    panels.rows += tile.first_key * kTileColumns;
    return panels;
  }
  const int64_t count = smaller(rules.keys - tile.first_key, tile.columns);
  const HeadRows key = rows_from(rules.dtype, task.key, tile.first_key);
  const HeadRows value = rows_from(rules.dtype, task.value, tile.first_key);
  pack_transposed({rules.dtype, key, 0, count, rules.size, block.transposed_keys, kBackwardKeyTile});
  pack_transposed({rules.dtype, value, 0, count, rules.value_size, block.transposed_values, kBackwardKeyTile});
  return {.transposed_keys = block.transposed_keys, .transposed_values = block.transposed_values};
}

// Scores to probabilities, and gradients of probabilities to those of scores. Around what a row sees there are zeros as
// far as a register tile of its neighbours, or of the transpose, may reach.
void differentiate_tile(const ScoreRules& rules, const Block& block, const Tile& tile) {
  const Columns all = columns_of_tile(rules, tile);
  for (int64_t group = 0; group < tile.rows; group += kTileRows) {
    Columns any = columns_of_rows(rules, tile, group, kTileRows);
    if (any.begin >= any.end) any = all;
    const int64_t any_begin = round_down(larger(any.begin - kTileRows, 0), kLanes);
    const int64_t any_end = round_up(smaller(any.end + kTileRows, tile.columns), kLanes);
    for (int64_t row = group; row < smaller(group + kTileRows, tile.rows); ++row) {
      float* scores = block.scores + row * tile.stride;
      float* gradients = block.gradients + row * tile.stride;
      const Columns seen = columns_of_row(rules, tile, row);
      int64_t begin = any_end, end = any_end;
      if (seen.begin < seen.end) {
        begin = round_down(seen.begin, kLanes);
        end = round_up(seen.end, kLanes);
        mask_edges(scores, seen);
      }
      const float lse = block.lse[row], delta = block.delta[row];
      for (int64_t j = any_begin; j < begin; j += kLanes) {
        cpu::store(scores + j, Vec{});
        cpu::store(gradients + j, Vec{});
      }
      for (int64_t j = begin; j < end; j += kLanes) {
        const Vec share = cpu::exp2_fast(cpu::load(scores + j) - lse);
        cpu::store(scores + j, share);
        cpu::store(gradients + j, share * (cpu::load(gradients + j) - delta));
      }
      for (int64_t j = end; j < any_end; j += kLanes) {
        cpu::store(scores + j, Vec{});
        cpu::store(gradients + j, Vec{});
      }
    }
  }
}

// panels += tile^T * rows, six keys at a time and only the queries that see one of them.
void multiply_transposed(const ScoreRules& rules, const Tile& tile, const float* scores, const float* rows,
                         int64_t size, float* panels, int64_t panel_rows) {
  const Columns seen = columns_of_tile(rules, tile);
  for (int64_t column = 0; column < size; column += kTileColumns) {
    const int vectors = panel_vectors(size, column);
    float* panel = panels + column * panel_rows + tile.first_key * kTileColumns;
    const float* row_panel = rows + column * kQueryTile;
    for (int64_t key = round_down(seen.begin, kTileRows); key < seen.end; key += kTileRows) {
      // Query q sees keys up to q + offset + right, from q + offset - left on.
      const int64_t diagonal = tile.first_key + key - rules.offset - tile.first_query;
      const int64_t first = larger(diagonal - rules.right, 0);
      const int64_t end = smaller(diagonal + kTileRows - 1 + rules.left + 1, tile.rows);
      if (first >= end) continue;
      cpu::multiply_tile(vectors, {scores + first * tile.stride + key, 1, tile.stride},
                         {row_panel + first * kTileColumns, kTileColumns}, end - first,
                         {panel + key * kTileColumns, kTileColumns}, true);
    }
  }
}

}  // namespace

int64_t backward_buffer_floats(int64_t size, int64_t value_size) {
  int64_t floats = 0;
  lay_out(nullptr, size, value_size, floats);
  return round_up(floats, 64);
}

void backward(const BackwardTask& task) {
  const ScoreRules& rules = *task.rules;
  int64_t floats = 0;
  const Block block = lay_out(task.buffer, rules.size, rules.value_size, floats);
  with_type(rules.dtype, [&](auto type) { load_queries<decltype(type)>(task, block); });
  if (task.sink_sum != nullptr) sum_sink(task, block.delta);
  for (int64_t i = 0; i < kQueryTile * block.stride; i += kLanes) cpu::store(block.grad_query + i, Vec{});
  for_tiles(rules, task.spans, task.span_count, task.first_query, task.rows, kBackwardKeyTile, kBackwardStride,
            [&](const Tile& tile) {
              const PackedKeys panels = panels_of_tile(task, block, tile);
              multiply_by_panels(rules, tile, block.query, block.stride, rules.size, panels.transposed_keys,
                                 block.scores);
              multiply_by_panels(rules, tile, block.grad_output, block.value_stride, rules.value_size,
                                 panels.transposed_values, block.gradients);
              if (rules.adjusts)
                kTileRules.adjust(rules, tile, block.scores, rules.softcap > 0 ? block.slopes : nullptr, block.before);
              if (rules.dropout_threshold != 0) kTileRules.drop(rules, tile, block.gradients);
              differentiate_tile(rules, block, tile);
              if (rules.dropout_threshold != 0) kTileRules.drop(rules, tile, block.scores);
              if (needs_unwinding(task)) kTileRules.unwind(task, tile, block.gradients, block.slopes, block.before);
              if (task.grad_query == nullptr) return;
              multiply_by_rows(rules, tile, block.gradients, panels.rows, panels.padded_keys, rules.size,
                               block.grad_query, block.stride);
              multiply_transposed(rules, tile, block.scores, block.grad_output_panels, rules.value_size,
                                  task.grad_values, task.grad_rows);
              multiply_transposed(rules, tile, block.gradients, block.query_panels, rules.size, task.grad_keys,
                                  task.grad_rows);
            });
  if (task.grad_query == nullptr) return;
  write_grad_query(task, block.grad_query, block.stride);
}

}  // namespace kernel_pytorch::attention::KP_ISA_NAMESPACE
