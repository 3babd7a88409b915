// Backward on tiles, one pass of five products: scores and gradients of probabilities of a tile, then from their
// elementwise product the gradients of queries (kept here), keys and values (added to panels that only this thread
// writes). The tile is [query][key] as in forward, and its transpose, which keys and values need, is a matter of
// strides.
#include "kernel_pytorch/cpu/vec_math.h"
#include "kernel_pytorch/ops/attention/attention_tiles.h"

namespace kernel_pytorch::attention::KP_ISA_NAMESPACE {
namespace {

struct Block {
  float* query;         // [rows][padded size], scaled for the scores
  float* query_panels;  // [panel][rows][kTileColumns], scaled for the gradient of keys
  float* grad_output;   // [rows][padded value size]
  float* grad_output_panels;
  float* scores;           // [rows][kScoreStride]: then probabilities
  float* gradients;        // likewise: of probabilities, then of scores
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
  block.scores = take(kQueryTile * kScoreStride);
  block.gradients = take(kQueryTile * kScoreStride);
  block.query = take(kQueryTile * block.stride);
  block.query_panels = take(kQueryTile * round_up(size, kTileColumns));
  block.grad_output = take(kQueryTile * block.value_stride);
  block.grad_output_panels = take(kQueryTile * round_up(value_size, kTileColumns));
  block.grad_query = take(kQueryTile * block.stride);
  block.lse = take(kQueryTile);
  block.delta = take(kQueryTile);
  block.transposed_keys = take(kBackwardKeyTile * size);
  block.transposed_values = take(kBackwardKeyTile * value_size);
  block.slopes = take(kQueryTile * kScoreStride);
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
    copy_rows<T>(rows, task.first_query, task.rows, task.rows, smaller(kTileColumns, rules.size - column), rules.scale,
                 block.query_panels + column * kQueryTile, kTileColumns);
  }
  for (int64_t column = 0; column < rules.value_size; column += kTileColumns) {
    const HeadRows rows{static_cast<const T*>(task.grad_output.data) + column, task.grad_output.row_stride};
    copy_rows<T>(rows, task.first_query, task.rows, task.rows, smaller(kTileColumns, rules.value_size - column), 1.0f,
                 block.grad_output_panels + column * kQueryTile, kTileColumns);
  }
  for (int64_t row = 0; row < task.rows; ++row) {
    const int64_t query = task.first_query + row;
    const T* output = static_cast<const T*>(task.output.data) + query * task.output.row_stride;
    const float* gradient = block.grad_output + row * block.value_stride;
    Vec sum{};
    cpu::for_columns<float>(rules.value_size, [&](int64_t j, auto lanes) {
      sum += cpu::load(output + j, lanes) * cpu::load(gradient + j);  // zeros behind the row
    });
    block.delta[row] = cpu::horizontal_sum(sum) - (task.grad_lse == nullptr ? 0.0f : task.grad_lse[query]);
    const float lse = task.lse[query];
    block.lse[row] = lse == kMinusInfinity ? __builtin_inff() : lse * kLog2E;
  }
}

void sum_sink(const BackwardTask& task, const Block& block) {
  float sum = 0;
  for (int64_t row = 0; row < task.rows; ++row) {
    const float lse = task.lse[task.first_query + row];
    if (lse == kMinusInfinity) continue;
    sum += cpu::exp(cpu::broadcast(task.rules->sink - lse))[0] * block.delta[row];
  }
  *task.sink_sum = sum;
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
  const int64_t end = smaller(rules.keys, tile.first_key + tile.columns);
  pack_transposed({rules.dtype, task.key, tile.first_key, end, rules.size, block.transposed_keys, 0});
  pack_transposed({rules.dtype, task.value, tile.first_key, end, rules.value_size, block.transposed_values, 0});
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
      float* scores = block.scores + row * kScoreStride;
      float* gradients = block.gradients + row * kScoreStride;
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

// The gradient of the bias, and what softcap leaves of that of the scores.
void unwind_tile(const BackwardTask& task, const Block& block, const Tile& tile) {
  const ScoreRules& rules = *task.rules;
  for (int64_t row = 0; row < tile.rows; ++row) {
    const Columns seen = columns_of_row(rules, tile, row);
    const int64_t begin = round_down(seen.begin, kLanes);
    float* gradients = block.gradients + row * kScoreStride;
    const float* slopes = block.slopes + row * kScoreStride;
    float* grad_bias = task.grad_bias;
    if (grad_bias != nullptr) grad_bias += (tile.first_query + row) * task.grad_bias_row_stride + tile.first_key;
    cpu::for_columns<float>(seen.end - begin, [&](int64_t place, auto lanes) {
      const int64_t j = begin + place;
      const Vec gradient = cpu::load(gradients + j);  // zero where the row sees nothing
      const Vec slope = rules.softcap > 0 ? cpu::load(slopes + j) : cpu::broadcast(1.0f);
      // A slope that was not computed may be anything.
      const Vec unwound = cpu::select(gradient == 0.0f, Vec{}, gradient * slope);
      cpu::store(gradients + j, unwound);
      if (grad_bias == nullptr) return;
      const Vec part = rules.softcap_after_bias ? unwound : gradient;
      cpu::store(grad_bias + j, cpu::load(grad_bias + j, lanes) + part, lanes);
    });
  }
}

// panels += tile^T * rows, six keys at a time and only the queries that see one of them.
void multiply_transposed(const ScoreRules& rules, const Tile& tile, const float* scores, const float* rows,
                         int64_t size, float* panels, int64_t panel_stride) {
  const Columns seen = columns_of_tile(rules, tile);
  for (int64_t column = 0; column < size; column += kTileColumns) {
    const int vectors = panel_vectors(size, column);
    float* panel = panels + column / kTileColumns * panel_stride + tile.first_key * kTileColumns;
    const float* row_panel = rows + column * kQueryTile;
    for (int64_t key = round_down(seen.begin, kTileRows); key < seen.end; key += kTileRows) {
      // Query q sees keys up to q + offset + right, from q + offset - left on.
      const int64_t diagonal = tile.first_key + key - rules.offset - tile.first_query;
      const int64_t first = larger(diagonal - rules.right, 0);
      const int64_t end = smaller(diagonal + kTileRows - 1 + rules.left + 1, tile.rows);
      if (first >= end) continue;
      cpu::multiply_tile(vectors, {scores + first * kScoreStride + key, 1, kScoreStride},
                         {row_panel + first * kTileColumns, kTileColumns}, end - first,
                         {panel + key * kTileColumns, kTileColumns}, true);
    }
  }
}

void write_grad_query(const BackwardTask& task, const Block& block) {
  const ScoreRules& rules = *task.rules;
  with_type(rules.dtype, [&](auto type) {
    using T = decltype(type);
    for (int64_t row = 0; row < task.rows; ++row) {
      T* to = static_cast<T*>(task.grad_query) + (task.first_query + row) * task.grad_query_row_stride;
      const float* from = block.grad_query + row * block.stride;
      cpu::for_columns<float>(
          rules.size, [&](int64_t j, auto lanes) { cpu::store(to + j, cpu::load(from + j) * rules.scale, lanes); });
    }
  });
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
  if (task.sink_sum != nullptr) sum_sink(task, block);
  for (int64_t i = 0; i < kQueryTile * block.stride; i += kLanes) cpu::store(block.grad_query + i, Vec{});
  for_tiles(rules, task.spans, task.span_count, task.first_query, task.rows, kBackwardKeyTile, [&](const Tile& tile) {
    const PackedKeys panels = panels_of_tile(task, block, tile);
    multiply_by_panels(rules, tile, block.query, block.stride, rules.size, panels.transposed_keys, block.scores);
    multiply_by_panels(rules, tile, block.grad_output, block.value_stride, rules.value_size, panels.transposed_values,
                       block.gradients);
    if (rules.adjusts) adjust_tile(rules, tile, block.scores, rules.softcap > 0 ? block.slopes : nullptr);
    if (rules.dropout_threshold != 0) drop_tile(rules, tile, block.gradients);
    differentiate_tile(rules, block, tile);
    if (rules.dropout_threshold != 0) drop_tile(rules, tile, block.scores);
    if (task.grad_bias != nullptr || rules.softcap > 0) unwind_tile(task, block, tile);
    if (task.grad_query == nullptr) return;
    multiply_by_rows(rules, tile, block.gradients, panels.rows, panels.row_panel_stride, rules.size, block.grad_query,
                     block.stride);
    multiply_transposed(rules, tile, block.scores, block.grad_output_panels, rules.value_size, task.grad_values,
                        task.grad_panel_stride);
    multiply_transposed(rules, tile, block.gradients, block.query_panels, rules.size, task.grad_keys,
                        task.grad_panel_stride);
  });
  if (task.grad_query != nullptr) write_grad_query(task, block);
}

}  // namespace kernel_pytorch::attention::KP_ISA_NAMESPACE
