// What may happen to a tile of scores between the products, outside of their loops: softcap, bias, ALiBi, mask,
// segments and dropout, a row at a time and only over the keys that the row sees.
#include "kernel_pytorch/cpu/vec_math.h"
#include "kernel_pytorch/cpu/vec_philox.h"
#include "kernel_pytorch/ops/attention/cpu/tiles.h"

namespace kernel_pytorch::attention::KP_ISA_NAMESPACE {
namespace {

using cpu::VecU8;

KP_PRIMITIVE int count_of(cpu::AllLanes) {
  return kLanes;
}
KP_PRIMITIVE int count_of(cpu::SomeLanes lanes) {
  return lanes.count;
}

// A row of the tile, from the first vector that it sees a key in.
struct Row {
  float* scores;  // of key `first_key`
  float* slopes;  // where softcap's derivative goes; null: not wanted
  int64_t query, first_key;
  int64_t begin, end;  // columns; begin at a vector
};

template <class Body>
KP_PRIMITIVE void for_row(const Row& row, Body body) {
  cpu::for_columns<float>(row.end - row.begin, [&](int64_t j, auto lanes) { body(row.begin + j, lanes); });
}

KP_PRIMITIVE Vec cap(const ScoreRules& rules, Vec score, float* slope) {
  const Vec bent = cpu::tanh(score * (1.0f / rules.softcap));
  if (slope != nullptr) cpu::store(slope, 1.0f - bent * bent);
  return cpu::select(score == kMinusInfinity, score, bent * rules.softcap);  // a bias may have removed the key
}

template <class T>
KP_PRIMITIVE void change_scores(const ScoreRules& rules, const Row& row, const T* bias) {
  const float diagonal = static_cast<float>(row.query + rules.offset - row.first_key);
  for_row(row, [&](int64_t j, auto lanes) {  // none where the row sees nothing
    Vec score = cpu::load(row.scores + j);
    float* slope = row.slopes == nullptr ? nullptr : row.slopes + j;
    if (rules.softcap > 0 && !rules.softcap_after_bias) score = cap(rules, score, slope);
    if (bias != nullptr) score += cpu::load(bias + j, lanes);
    if (rules.slope != 0) {
      const Vec distance = __builtin_convertvector(lane_numbers(j), Vec) - diagonal;
      score -= rules.slope * cpu::abs(distance);
    }
    if (rules.softcap > 0 && rules.softcap_after_bias) score = cap(rules, score, slope);
    cpu::store(row.scores + j, score);
  });
}

// Lanes of -1 for the keys that a mask keeps.
template <class Lanes>
KP_PRIMITIVE VecI load_mask(const uint8_t* mask, int64_t stride, Lanes lanes) {
  if (stride == 1) {
    const VecU8 bytes = cpu::load_storage_partial<VecU8, 1>(mask, count_of(lanes));
    return cpu::widen_bits(bytes) != 0u;
  }
  VecI kept{};
  for (int i = 0; i < count_of(lanes); ++i) kept[i] = mask[i * stride] != 0 ? -1 : 0;
  return kept;
}

// Scores in units of log 2, -inf where a key is not kept.
KP_PRIMITIVE void drop_scores(const ScoreRules& rules, const Row& row) {
  const uint8_t* mask = rules.mask == nullptr
                            ? nullptr
                            : rules.mask + row.query * rules.mask_row_stride + row.first_key * rules.mask_key_stride;
  const int32_t* segments = rules.key_segments == nullptr ? nullptr : rules.key_segments + row.first_key;
  const int32_t segment = segments == nullptr ? 0 : rules.query_segments[row.query];
  const Vec dropped = cpu::broadcast(kMinusInfinity);
  for_row(row, [&](int64_t j, auto lanes) {
    Vec score = cpu::load(row.scores + j) * kLog2E;
    if (mask != nullptr) {
      score = cpu::select(load_mask(mask + j * rules.mask_key_stride, rules.mask_key_stride, lanes), score, dropped);
    }
    if (segments != nullptr) {
      const VecI ids = cpu::load_storage_partial<VecI, 4>(segments + j, count_of(lanes));
      score = cpu::select(segment == -1 ? VecI{} : ids == segment, score, dropped);
    }
    cpu::store(row.scores + j, score);
  });
}

void change_row(const ScoreRules& rules, const Row& row) {
  if (rules.bias == nullptr && rules.softcap == 0 && rules.slope == 0) return;
  with_type(rules.bias_dtype, [&](auto type) {
    using T = decltype(type);
    const T* bias = static_cast<const T*>(rules.bias);
    change_scores<T>(rules, row, bias == nullptr ? nullptr : bias + row.query * rules.bias_row_stride + row.first_key);
  });
}

// Bytes of dropout for the queries of one block, as attention/cuda/dropout_cuda.h lays them out: of four rows. A
// square's four blocks hold key 8 h + 2 i + b in byte 2 h + b of block i.
constexpr int64_t kKeysPerCall = 4 * kLanes;
constexpr int64_t kDropoutBytes = kKeyTile + 16;  // a part may begin inside of a square

KP_PRIMITIVE void draw_bytes(const ScoreRules& rules, uint32_t query_block, int64_t first_key, int64_t columns,
                             uint8_t (*bytes)[kDropoutBytes]) {
  alignas(64) uint32_t words[4 * kLanes];
  const uint32_t first_block = static_cast<uint32_t>(first_key / 4);
  for (int64_t j = 0; j < columns; j += kKeysPerCall) {
    const uint64_t block = uint64_t{query_block} << 32 | (first_block + static_cast<uint32_t>(j / 4));
    cpu::philox_blocks(rules.seed, rules.seed_offset, block, words);
    for (int64_t key = 0; key < smaller(kKeysPerCall, columns - j); ++key) {
      const int64_t in_square = key % 16;
      const uint32_t* of_block = words + (key / 16 * 4 + in_square % 8 / 2) * 4;
      const int64_t shift = (in_square / 8 * 2 + in_square % 2) * 8;
      for (int place = 0; place < 4; ++place) bytes[place][j + key] = static_cast<uint8_t>(of_block[place] >> shift);
    }
  }
}

KP_PRIMITIVE void drop_row(const ScoreRules& rules, float* values, const uint8_t* bytes, Columns seen) {
  const int64_t end = round_up(seen.end, kLanes);
  for (int64_t j = round_down(seen.begin, kLanes); j < end; j += kLanes) {
    const VecI kept = cpu::widen_bits(cpu::load_storage<VecU8>(bytes + j)) >= rules.dropout_threshold;
    cpu::store(values + j, cpu::select(kept, cpu::load(values + j) * rules.dropout_scale, Vec{}));
  }
}

}  // namespace

static Row row_of_tile(const ScoreRules& rules, const Tile& tile, int64_t i, float* scores, float* slopes) {
  const Columns seen = columns_of_row(rules, tile, i);
  const int64_t place = i * tile.stride;
  return {.scores = scores + place,
          .slopes = slopes == nullptr ? nullptr : slopes + place,
          .query = tile.first_query + i,
          .first_key = tile.first_key,
          .begin = round_down(seen.begin, kLanes),
          .end = seen.end};
}

static void adjust_tile(const ScoreRules& rules, const Tile& tile, float* scores, float* slopes, float* before) {
  if (rules.programs == nullptr) {
    for (int64_t i = 0; i < tile.rows; ++i) {
      const Row row = row_of_tile(rules, tile, i, scores, slopes);
      if (row.begin >= row.end) continue;
      change_row(rules, row);
      drop_scores(rules, row);
    }
    return;
  }
  // Programs walk over the tile themselves.
  for (int64_t i = 0; i < tile.rows; ++i) change_row(rules, row_of_tile(rules, tile, i, scores, slopes));
  const Columns seen = columns_of_tile(rules, tile);
  if (before != nullptr && rules.programs->changes_scores) {
    for (int64_t i = 0; i < tile.rows; ++i) {
      for (int64_t j = round_down(seen.begin, kLanes); j < seen.end; j += kLanes) {
        cpu::store(before + i * tile.stride + j, cpu::load(scores + i * tile.stride + j));
      }
    }
  }
  rules.programs->apply(*rules.programs, rules, tile, seen.begin, seen.end, scores);
  for (int64_t i = 0; i < tile.rows; ++i) drop_scores(rules, row_of_tile(rules, tile, i, scores, slopes));
}

static void drop_tile(const ScoreRules& rules, const Tile& tile, float* values) {
  // Rows that share a block: 2 i, 2 i + 1, 2 i + 8, 2 i + 9 of sixteen.
  alignas(64) uint8_t bytes[4][kDropoutBytes];
  const Columns any = columns_of_tile(rules, tile);
  const int64_t begin = round_down(any.begin, kKeysPerCall);
  const int64_t first_key = rules.part_key + tile.first_key + begin, in_square = first_key % 16;
  const int64_t columns = round_up(any.end, kLanes) - begin + in_square;
  const int64_t first_query = rules.part_query + tile.first_query, last_query = first_query + tile.rows;
  for (int64_t square = round_down(first_query, 16); square < last_query; square += 16) {
    for (int64_t i = 0; i < 4; ++i) {
      draw_bytes(rules, static_cast<uint32_t>(square / 4 + i), first_key - in_square, columns, bytes);
      for (int64_t place = 0; place < 4; ++place) {
        const int64_t query = square + place / 2 * 8 + 2 * i + place % 2;
        if (query < first_query || query >= last_query) continue;
        const int64_t row = query - first_query;
        const Columns seen = columns_of_row(rules, tile, row);
        if (seen.begin < seen.end) drop_row(rules, values + row * tile.stride, bytes[place] + in_square - begin, seen);
      }
    }
  }
}

// Rows that see the same columns at a time: of what a row does not see, a program's derivative may be anything.
static void unwind_programs(const ScoreRules& rules, const Tile& tile, const float* before, float* gradients) {
  for (int64_t first = 0, end = 0; first < tile.rows; first = end) {
    const Columns seen = columns_of_row(rules, tile, first);
    for (end = first + 1; end < tile.rows; ++end) {
      const Columns next = columns_of_row(rules, tile, end);
      if (next.begin != seen.begin || next.end != seen.end) break;
    }
    if (seen.begin >= seen.end) continue;
    Tile rows = tile;
    rows.first_query += first;
    rows.rows = end - first;
    rules.programs->unwind(*rules.programs, rules, rows, seen.begin, seen.end, before + first * tile.stride,
                           gradients + first * tile.stride);
  }
}

// The gradient of the bias, and what softcap leaves of that of the scores.
static void unwind_tile(const BackwardTask& task, const Tile& tile, float* gradients_of_tile,
                        const float* slopes_of_tile, const float* before) {
  const ScoreRules& rules = *task.rules;
  if (rules.programs != nullptr && rules.programs->changes_scores) {
    unwind_programs(rules, tile, before, gradients_of_tile);
  }
  if (task.grad_bias == nullptr && rules.softcap == 0) return;
  for (int64_t row = 0; row < tile.rows; ++row) {
    const Columns seen = columns_of_row(rules, tile, row);
    const int64_t begin = round_down(seen.begin, kLanes);
    float* gradients = gradients_of_tile + row * tile.stride;
    const float* slopes = slopes_of_tile + row * tile.stride;
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

extern const TileRules kTileRules = {.adjust = adjust_tile, .drop = drop_tile, .unwind = unwind_tile};

}  // namespace kernel_pytorch::attention::KP_ISA_NAMESPACE
