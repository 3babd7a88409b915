// kp-isa: v4amx
// Backward in bf16 on AMX tiles: as attention/cpu/backward_isa.cpp, by blocks of 32 x 32. Gradients of keys and values
// are summed transposed, grad_value^T += grad_output^T P, so that P and dS are operands whose rows come in pairs, which
// rounding two rows of fp32 at once gives for nothing; only the gradient of queries needs dS a second time, row by row.
#include "kernel_pytorch/ops/attention/cpu/amx.h"

namespace kernel_pytorch::attention::KP_ISA_NAMESPACE {
namespace {

constexpr int64_t kRowBlocks = kAmxBackwardRows / kBlock, kKeyBlocks = kBackwardKeyTile / kBlock;
constexpr int64_t kGradientFloats = kBlock * kBlock;  // of a block of gradients: four tiles of fp32

struct Block {
  char *query, *grad_output;                        // blocks (row / 32, column / 32)
  char *query_transposed, *grad_output_transposed;  // blocks (column / 32, row / 32)
  char *share_pairs, *gradient_pairs;               // blocks (key / 32, row / 32), of pairs of rows
  char* gradient_rows;                              // blocks (row / 32, key / 32)
  char *keys, *values;                              // of one tile, where the task packs
  float *scores, *gradients, *slopes, *before;      // [rows][kBackwardStride]
  float* grad_query;                                // [rows][grad_query_stride]
  float *lse, *delta;
  int64_t grad_query_stride;
};

Block lay_out(float* buffer, int64_t size, int64_t value_size, int64_t& floats) {
  float* next = buffer;
  const auto take = [&](int64_t count) {
    float* taken = next;
    next += round_up(count, 16);
    return taken;
  };
  const auto take_blocks = [&](int64_t count) { return reinterpret_cast<char*>(take(count * kBlockFloats)); };
  Block block{};
  block.grad_query_stride = round_up(size, kBlock) + 16;
  block.scores = take(kAmxBackwardRows * kBackwardStride);
  block.gradients = take(kAmxBackwardRows * kBackwardStride);
  block.share_pairs = take_blocks(kKeyBlocks * kRowBlocks);
  block.gradient_pairs = take_blocks(kKeyBlocks * kRowBlocks);
  block.gradient_rows = take_blocks(kKeyBlocks * kRowBlocks);
  block.query = take_blocks(kRowBlocks * blocks_of(size));
  block.query_transposed = take_blocks(kRowBlocks * blocks_of(size));
  block.grad_output = take_blocks(kRowBlocks * blocks_of(value_size));
  block.grad_output_transposed = take_blocks(kRowBlocks * blocks_of(value_size));
  block.grad_query = take(kAmxBackwardRows * block.grad_query_stride);
  block.lse = take(kAmxBackwardRows);
  block.delta = take(kAmxBackwardRows);
  block.keys = take_blocks(kKeyBlocks * blocks_of(size));
  block.values = take_blocks(kKeyBlocks * blocks_of(value_size));
  block.slopes = take(kAmxBackwardRows * kBackwardStride);
  block.before = take(kAmxBackwardRows * kBackwardStride);
  floats = next - buffer;
  return block;
}

// The transpose of rows as tiles of A: block (column / 32, row / 32), its tiles 16 columns each. Pairs of rows are
// words, whose transpose has the rows of a column in their order.
void pack_a_transposed(const HeadRows& rows, int64_t first, int64_t count, int64_t size, char* to) {
  alignas(64) char pairs[kBlockBytes];
  for (int64_t row = 0; row < count; row += kBlock) {
    for (int64_t column = 0; column < size; column += kBlock) {
      const HeadRows part{row_of(rows, first + row) + column, rows.row_stride};
      pack_b(part, 0, smaller(kBlock, count - row), smaller(kBlock, size - column), pairs);
      char* block = to + (column / kBlock * kRowBlocks + row / kBlock) * kBlockBytes;
      for (int half = 0; half < 2; ++half) {
        cpu::VecU words[16];
        const char* from = pairs + half * cpu::kAmxTileBytes;
        for (int i = 0; i < 16; ++i) words[i] = cpu::load_storage<cpu::VecU>(from + i * cpu::kAmxRowBytes);
        transpose_words(words);
        for (int i = 0; i < 16; ++i) {
          cpu::store_storage(block + half * cpu::kAmxTileBytes + i * cpu::kAmxRowBytes, words[i]);
        }
      }
    }
  }
}

// 32 columns of two neighbouring rows: probabilities and gradients of scores.
struct TwoRows {
  Vec low[2], high[2];
};

KP_PRIMITIVE void write_blocks(const Block& block, int64_t row, int64_t column, const TwoRows& shares,
                               const TwoRows& gradients) {
  const int64_t pair_place = (column / kBlock * kRowBlocks + row / kBlock) * kBlockBytes + row % kBlock / 2 * 64;
  char* share_pair = block.share_pairs + pair_place;
  char* gradient_pair = block.gradient_pairs + pair_place;
  cpu::store_storage(share_pair, cpu::to_bfloat16_pairs(shares.low[0], shares.low[1]));
  cpu::store_storage(share_pair + cpu::kAmxTileBytes, cpu::to_bfloat16_pairs(shares.high[0], shares.high[1]));
  cpu::store_storage(gradient_pair, cpu::to_bfloat16_pairs(gradients.low[0], gradients.low[1]));
  cpu::store_storage(gradient_pair + cpu::kAmxTileBytes, cpu::to_bfloat16_pairs(gradients.high[0], gradients.high[1]));
  char* rows = block.gradient_rows + (row / kBlock * kKeyBlocks + column / kBlock) * kBlockBytes + row % kBlock * 64;
  cpu::store_storage(rows, cpu::to_bfloat16(gradients.low[0], gradients.high[0]));
  cpu::store_storage(rows + 64, cpu::to_bfloat16(gradients.low[1], gradients.high[1]));
}

// Scores to probabilities, gradients of probabilities to those of scores, as blocks; or in place, where rules follow.
template <bool kInPlace>
void differentiate_tile(const ScoreRules& rules, const Block& block, const Tile& tile, float factor) {
  for (int64_t group = 0; group < tile.rows; group += kBlock) {
    const Columns any = columns_of_rows(rules, tile, group, kBlock);
    const int64_t begin = round_down(any.begin, kBlock), end = round_up(any.end, kBlock);
    for (int64_t row = group; begin < end && row < group + kBlock; row += 2) {
      float* scores = block.scores + row * tile.stride;
      float* gradients = block.gradients + row * tile.stride;
      for (int i = 0; i < 2; ++i) {
        const Columns seen = columns_of_row(rules, tile, row + i);
        hide_columns(scores + i * tile.stride, seen.begin < seen.end ? seen : Columns{end, end}, begin, end);
      }
      for (int64_t j = begin; j < end; j += kBlock) {
        TwoRows shares, of_scores;
        for (int i = 0; i < 2; ++i) {
          float* score = scores + i * tile.stride + j;
          float* gradient = gradients + i * tile.stride + j;
          const float lse = block.lse[row + i], delta = block.delta[row + i];
          shares.low[i] = cpu::exp2_fast(cpu::load(score) * factor - lse);
          shares.high[i] = cpu::exp2_fast(cpu::load(score + kLanes) * factor - lse);
          of_scores.low[i] = shares.low[i] * (cpu::load(gradient) - delta);
          of_scores.high[i] = shares.high[i] * (cpu::load(gradient + kLanes) - delta);
          if constexpr (kInPlace) {
            cpu::store(score, shares.low[i]);
            cpu::store(score + kLanes, shares.high[i]);
            cpu::store(gradient, of_scores.low[i]);
            cpu::store(gradient + kLanes, of_scores.high[i]);
          }
        }
        if constexpr (!kInPlace) write_blocks(block, row, j, shares, of_scores);
      }
    }
  }
}

void convert_tile(const ScoreRules& rules, const Block& block, const Tile& tile) {
  for (int64_t group = 0; group < tile.rows; group += kBlock) {
    const Columns any = columns_of_rows(rules, tile, group, kBlock);
    for (int64_t row = group; row < group + kBlock; row += 2) {
      for (int64_t j = round_down(any.begin, kBlock); j < any.end; j += kBlock) {
        TwoRows shares, gradients;
        for (int i = 0; i < 2; ++i) {
          const int64_t place = (row + i) * tile.stride + j;
          shares.low[i] = cpu::load(block.scores + place);
          shares.high[i] = cpu::load(block.scores + place + kLanes);
          gradients.low[i] = cpu::load(block.gradients + place);
          gradients.high[i] = cpu::load(block.gradients + place + kLanes);
        }
        write_blocks(block, row, j, shares, gradients);
      }
    }
  }
}

// sums^T += rows^T * tile: for 32 keys at a time, from the blocks of rows that see one of them.
void multiply_transposed(const ScoreRules& rules, const Tile& tile, const char* rows_transposed, const char* pairs,
                         int64_t size, float* sums) {
  const Columns seen = columns_of_tile(rules, tile);
  for (int64_t key = round_down(seen.begin, kBlock); key < seen.end; key += kBlock) {
    int64_t first = -1, end = 0;
    for (int64_t row = 0; row < tile.rows; row += kBlock) {
      const Columns any = columns_of_rows(rules, tile, row, kBlock);
      if (any.begin >= key + kBlock || any.end <= key) continue;
      if (first < 0) first = row / kBlock;
      end = row / kBlock + 1;
    }
    if (first < 0) continue;
    for (int64_t column = 0; column < blocks_of(size); ++column) {
      float* to = sums + ((tile.first_key + key) / kBlock * blocks_of(size) + column) * kGradientFloats;
      cpu::multiply_bfloat16_blocks(rows_transposed + (column * kRowBlocks + first) * kBlockBytes, kBlockBytes,
                                    pairs + (key / kBlock * kRowBlocks + first) * kBlockBytes, kBlockBytes, end - first,
                                    {to, 64, cpu::kAmxTileBytes, 2 * cpu::kAmxTileBytes}, true);
    }
  }
}

void multiply_tile(const BackwardTask& task, const Block& block, const Tile& tile) {
  const ScoreRules& rules = *task.rules;
  const char* keys = block.keys;
  const char* values = block.values;
  if (task.packed != nullptr) {
    keys = blocks_at(task.packed->transposed_keys, tile.first_key, rules.size);
    values = blocks_at(task.packed->transposed_values, tile.first_key, rules.value_size);
  } else {
    const int64_t count = smaller(rules.keys - tile.first_key, tile.columns);
    pack_b_transposed(rows_from(rules.dtype, task.key, tile.first_key), 0, count, rules.size, block.keys);
    pack_b_transposed(rows_from(rules.dtype, task.value, tile.first_key), 0, count, rules.value_size, block.values);
  }
  multiply_blocks_by_keys(rules, tile, block.query, keys, rules.size, block.scores);
  multiply_blocks_by_keys(rules, tile, block.grad_output, values, rules.value_size, block.gradients);
}

void multiply_gradients(const BackwardTask& task, const Block& block, const Tile& tile) {
  const ScoreRules& rules = *task.rules;
  multiply_blocks_by_rows(rules, tile, block.gradient_rows, blocks_at(task.packed->rows, tile.first_key, rules.size),
                          rules.size, block.grad_query, block.grad_query_stride);
  multiply_transposed(rules, tile, block.grad_output_transposed, block.share_pairs, rules.value_size, task.grad_values);
  multiply_transposed(rules, tile, block.query_transposed, block.gradient_pairs, rules.size, task.grad_keys);
}

}  // namespace

int64_t amx_gradient_floats(int64_t size) {
  return blocks_of(size) * kBlock;
}

int64_t amx_backward_buffer_floats(int64_t size, int64_t value_size) {
  int64_t floats = 0;
  lay_out(nullptr, size, value_size, floats);
  return round_up(floats, 64);
}

void amx_backward(const BackwardTask& task) {
  const ScoreRules& rules = *task.rules;
  int64_t floats = 0;
  const Block block = lay_out(task.buffer, rules.size, rules.value_size, floats);
  pack_a(task.query, task.first_query, task.rows, rules.size, block.query);
  pack_a(task.grad_output, task.first_query, task.rows, rules.value_size, block.grad_output);
  pack_a_transposed(task.query, task.first_query, task.rows, rules.size, block.query_transposed);
  pack_a_transposed(task.grad_output, task.first_query, task.rows, rules.value_size, block.grad_output_transposed);
  load_statistics<BFloat16>(task, round_up(task.rows, kBlock), block.delta, block.lse);
  if (task.sink_sum != nullptr) sum_sink(task, block.delta);
  for (int64_t i = 0; i < kAmxBackwardRows * block.grad_query_stride; i += kLanes) {
    cpu::store(block.grad_query + i, Vec{});
  }
  const bool has_rules = rules.dropout_threshold != 0 || needs_unwinding(task);
  cpu::configure_tiles();
  for_tiles(rules, task.spans, task.span_count, task.first_query, task.rows, kBackwardKeyTile, kBackwardStride,
            [&](const Tile& tile) {
              multiply_tile(task, block, tile);
              const TileRules& of_tile = isa_v4::kTileRules;
              // Where rules follow, and where a factor below zero would turn -inf round, scores are scaled first.
              const bool scale_first = rules.adjusts || !(rules.scale > 0);
              if (scale_first)
                scale_tile(rules, tile, block.scores, rules.adjusts ? rules.scale : rules.scale * kLog2E);
              if (rules.adjusts) {
                of_tile.adjust(rules, tile, block.scores, rules.softcap > 0 ? block.slopes : nullptr, block.before);
              }
              const float factor = scale_first ? 1.0f : rules.scale * kLog2E;
              if (has_rules) {
                if (rules.dropout_threshold != 0) of_tile.drop(rules, tile, block.gradients);
                differentiate_tile<true>(rules, block, tile, factor);
                if (rules.dropout_threshold != 0) of_tile.drop(rules, tile, block.scores);
                if (needs_unwinding(task)) of_tile.unwind(task, tile, block.gradients, block.slopes, block.before);
                convert_tile(rules, block, tile);
              } else {
                differentiate_tile<false>(rules, block, tile, factor);
              }
              if (task.grad_query != nullptr) multiply_gradients(task, block, tile);
            });
  cpu::release_tiles();
  if (task.grad_query != nullptr) write_grad_query(task, block.grad_query, block.grad_query_stride);
}

void amx_write_gradient(const GradientTask& task) {
  for (int64_t row = task.begin; row < task.end; row += 16) {
    for (int64_t column = 0; column < task.size; column += 16) {
      const int64_t block = row / kBlock * blocks_of(task.size) + column / kBlock;
      const int64_t tile = column % kBlock / 16 * 2 + row % kBlock / 16;
      const float* from = task.parts + block * kGradientFloats + tile * 256;
      Vec sums[kLanes] = {};
      for (int64_t part = 0; row < task.rows_that_count && part < task.part_count; ++part) {
        for (int i = 0; i < 16; ++i) sums[i] += cpu::load(from + part * task.part_stride + i * 16);
      }
      cpu::transpose(sums);
      for (int64_t i = 0; i < smaller(16, task.end - row); ++i) {
        const Vec sum = row + i < task.rows_that_count ? sums[i] * task.factor : Vec{};
        const int64_t place = (row + i) * task.row_stride + column, count = smaller(16, task.size - column);
        if (task.dtype == DType::kFloat32) {
          float* to = static_cast<float*>(task.to) + place;
          cpu::store_partial(to, task.accumulate ? sum + cpu::load_partial(to, count) : sum, count);
        } else {
          cpu::store_partial(static_cast<BFloat16*>(task.to) + place, sum, count);
        }
      }
    }
  }
}

}  // namespace kernel_pytorch::attention::KP_ISA_NAMESPACE
