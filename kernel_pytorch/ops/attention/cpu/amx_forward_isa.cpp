// kp-isa: v4amx
// Forward in bf16 on AMX tiles: as attention/cpu/forward_isa.cpp, with both products by blocks of 32 x 32 and the
// probabilities rounded to bf16 between them. What rules do to a tile of scores is the code of level v4.
#include "kernel_pytorch/ops/attention/cpu/amx.h"

namespace kernel_pytorch::attention::KP_ISA_NAMESPACE {
namespace {

struct Block {
  char* query;          // blocks (row / 32, column / 32)
  char* probabilities;  // blocks (row / 32, key / 32)
  char* keys;           // of one tile, where the task packs
  char* values;
  float* scores;  // [rows][kScoreStride]
  float* sums;    // [rows][sum_stride]
  float* most;    // [rows]: largest score so far
  float* total;   // [rows][kLanes]
  int64_t sum_stride;
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
  block.sum_stride = round_up(value_size, kBlock) + 16;  // rows of tiles must not all fall into one set of the cache
  block.scores = take(kAmxForwardRows * kScoreStride);
  block.probabilities = take_blocks(kAmxForwardRows / kBlock * kKeyTile / kBlock);
  block.query = take_blocks(kAmxForwardRows / kBlock * blocks_of(size));
  block.sums = take(kAmxForwardRows * block.sum_stride);
  block.total = take(kAmxForwardRows * kLanes);
  block.keys = take_blocks(kKeyTile / kBlock * blocks_of(size));
  block.values = take_blocks(kKeyTile / kBlock * blocks_of(value_size));
  block.most = take(kAmxForwardRows);
  floats = next - buffer;
  return block;
}

// As softmax_row of the fp32 kernel, with `factor` still to be applied to the scores and powers written as bf16: 32
// columns at a time, [begin, end) being multiples of 32.
KP_PRIMITIVE void softmax_row(const Block& block, int64_t row, float* scores, int64_t begin, int64_t end, float factor,
                              bool keep_powers) {
  Vec most[2] = {cpu::broadcast(kMinusInfinity), cpu::broadcast(kMinusInfinity)};
  for (int64_t j = begin; j < end; j += kBlock) {
    most[0] = cpu::max(cpu::load(scores + j), most[0]);
    most[1] = cpu::max(cpu::load(scores + j + kLanes), most[1]);
  }
  const float before = block.most[row];
  const float tile_most = cpu::horizontal_max(cpu::max(most[0], most[1])) * factor;
  const float now = tile_most > before ? tile_most : before;
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
  char* to = block.probabilities + row / kBlock * (kKeyTile / kBlock) * kBlockBytes + row % kBlock * cpu::kAmxRowBytes;
  for (int64_t j = begin; j < end; j += kBlock) {
    const Vec low = cpu::exp2_fast(cpu::load(scores + j) * factor - reference);
    const Vec high = cpu::exp2_fast(cpu::load(scores + j + kLanes) * factor - reference);
    total += low + high;
    cpu::store_storage(to + j / kBlock * kBlockBytes, cpu::to_bfloat16(low, high));
    if (keep_powers) {
      cpu::store(scores + j, low);
      cpu::store(scores + j + kLanes, high);
    }
  }
  cpu::store(block.total + row * kLanes, total);
}

KP_PRIMITIVE void convert_row(const Block& block, int64_t row, const float* powers, int64_t begin, int64_t end) {
  char* to = block.probabilities + row / kBlock * (kKeyTile / kBlock) * kBlockBytes + row % kBlock * cpu::kAmxRowBytes;
  for (int64_t j = begin; j < end; j += kBlock) {
    const cpu::VecU words = cpu::to_bfloat16(cpu::load(powers + j), cpu::load(powers + j + kLanes));
    cpu::store_storage(to + j / kBlock * kBlockBytes, words);
  }
}

void softmax_tile(const ScoreRules& rules, const Block& block, const Tile& tile, float factor) {
  for (int64_t group = 0; group < tile.rows; group += kBlock) {
    const Columns any = columns_of_rows(rules, tile, group, kBlock);
    const int64_t begin = round_down(any.begin, kBlock), end = round_up(any.end, kBlock);
    for (int64_t row = group; row < smaller(group + kBlock, tile.rows); ++row) {
      float* scores = block.scores + row * tile.stride;
      const Columns seen = columns_of_row(rules, tile, row);
      hide_columns(scores, seen.begin < seen.end ? seen : Columns{end, end}, begin, end);
      softmax_row(block, row, scores, begin, end, factor, rules.dropout_threshold != 0);
    }
  }
}

void drop_probabilities(const ScoreRules& rules, const Block& block, const Tile& tile) {
  isa_v4::kTileRules.drop(rules, tile, block.scores);
  for (int64_t group = 0; group < tile.rows; group += kBlock) {
    const Columns any = columns_of_rows(rules, tile, group, kBlock);
    for (int64_t row = group; row < smaller(group + kBlock, tile.rows); ++row) {
      convert_row(block, row, block.scores + row * tile.stride, round_down(any.begin, kBlock),
                  round_up(any.end, kBlock));
    }
  }
}

}  // namespace

static void pack_transposed_blocks(const PackTask& task) {
  pack_b_transposed(task.rows, task.begin, task.end, task.size, reinterpret_cast<char*>(task.to));
}
static void pack_row_blocks(const PackTask& task) {
  pack_b(task.rows, task.begin, task.end, task.size, reinterpret_cast<char*>(task.to));
}
static int64_t packed_floats(int64_t size) {
  return packed_key_floats(size);
}

static int64_t amx_forward_buffer_floats(int64_t size, int64_t value_size) {
  int64_t floats = 0;
  lay_out(nullptr, size, value_size, floats);
  return round_up(floats, 64);
}

static void amx_forward(const ForwardTask& task) {
  const ScoreRules& rules = *task.rules;
  int64_t floats = 0;
  const Block block = lay_out(task.buffer, rules.size, rules.value_size, floats);
  const int64_t rows = round_up(task.rows, kBlock);
  pack_a(task.query, task.first_query, task.rows, rules.size, block.query);
  for (int64_t i = 0; i < rows * block.sum_stride; i += kLanes) cpu::store(block.sums + i, Vec{});
  for (int64_t i = 0; i < rows * kLanes; i += kLanes) cpu::store(block.total + i, Vec{});
  for (int64_t i = 0; i < rows; ++i) block.most[i] = kMinusInfinity;
  __builtin_memset(block.probabilities, 0,
                   static_cast<size_t>(kAmxForwardRows / kBlock * kKeyTile / kBlock * kBlockBytes));
  // Where rules follow, and where a factor below zero would turn the order round, scores are scaled first.
  const bool scale_first = rules.adjusts || !(rules.scale > 0);
  const float factor = scale_first ? 1.0f : rules.scale * kLog2E;
  cpu::configure_tiles();
  for_tiles(rules, task.spans, task.span_count, task.first_query, task.rows, kKeyTile, kScoreStride,
            [&](const Tile& tile) {
              const char* keys = block.keys;
              const char* values = block.values;
              if (task.packed != nullptr) {
                keys = blocks_at(task.packed->transposed_keys, tile.first_key, rules.size);
                values = blocks_at(task.packed->rows, tile.first_key, rules.value_size);
              } else {
                const int64_t count = smaller(rules.keys - tile.first_key, kKeyTile);
                pack_b_transposed(rows_from(rules.dtype, task.key, tile.first_key), 0, count, rules.size, block.keys);
                pack_b(rows_from(rules.dtype, task.value, tile.first_key), 0, count, rules.value_size, block.values);
              }
              multiply_blocks_by_keys(rules, tile, block.query, keys, rules.size, block.scores);
              if (scale_first)
                scale_tile(rules, tile, block.scores, rules.adjusts ? rules.scale : rules.scale * kLog2E);
              if (rules.adjusts) isa_v4::kTileRules.adjust(rules, tile, block.scores, nullptr, nullptr);
              softmax_tile(rules, block, tile, factor);
              if (rules.dropout_threshold != 0) drop_probabilities(rules, block, tile);
              multiply_blocks_by_rows(rules, tile, block.probabilities, values, rules.value_size, block.sums,
                                      block.sum_stride);
            });
  cpu::release_tiles();
  for (int64_t row = 0; row < task.rows; ++row) {
    finish_row(task, row, block.most[row], cpu::horizontal_sum(cpu::load(block.total + row * kLanes)),
               block.sums + row * block.sum_stride);
  }
}

extern const TileKernels kAmxKernels = {
    .query_tile = kAmxForwardRows,
    .backward_query_tile = kAmxBackwardRows,
    .key_alignment = kBlock,
    .transposed_floats = packed_floats,
    .row_floats = packed_floats,
    .gradient_floats = amx_gradient_floats,
    .pack_transposed = pack_transposed_blocks,
    .pack_rows = pack_row_blocks,
    .forward_buffer_floats = amx_forward_buffer_floats,
    .forward = amx_forward,
    .backward_buffer_floats = amx_backward_buffer_floats,
    .backward = amx_backward,
    .write_gradient = amx_write_gradient,
};

}  // namespace kernel_pytorch::attention::KP_ISA_NAMESPACE
