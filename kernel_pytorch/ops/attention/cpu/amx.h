// Words that the AMX kernels of attention share: packing bf16 rows as tiles. A block is two tiles, 32 rows or columns
// of 32 elements, 2 KB without gaps; sizes and rows behind the last are zeros. For *_isa.cpp only.
#pragma once

#include "kernel_pytorch/cpu/amx.h"
#include "kernel_pytorch/cpu/vec_math.h"
#include "kernel_pytorch/ops/attention/cpu/tiles.h"

#if defined(__AVX512F__)  // whoever has tiles has these lanes

namespace kernel_pytorch::attention::KP_ISA_NAMESPACE {

constexpr int64_t kBlock = 32;
constexpr int64_t kBlockBytes = 2 * cpu::kAmxTileBytes;
constexpr int64_t kBlockFloats = kBlockBytes / 4;
constexpr int64_t kAmxForwardRows = kQueryTile;
constexpr int64_t kAmxBackwardRows = 192;  // of queries: sums of keys' gradients are loaded and stored once in so many
static_assert(kAmxBackwardRows % kBlock == 0 && kKeyTile % kBlock == 0 && kBackwardKeyTile % kBlock == 0 &&
              kQueryTile % kBlock == 0);

KP_PRIMITIVE int64_t blocks_of(int64_t count) {
  return (count + kBlock - 1) / kBlock;
}

// 32 elements of a row from `column` on.
KP_PRIMITIVE cpu::VecU load_words(const BFloat16* row, int64_t column, int64_t size) {
  const int64_t left = size - column;
  if (left >= kBlock) return cpu::load_storage<cpu::VecU>(row + column);
  cpu::VecU words{};
  if (left > 0) __builtin_memcpy(&words, row + column, static_cast<size_t>(left) * sizeof(BFloat16));
  return words;
}

KP_PRIMITIVE const BFloat16* row_of(const HeadRows& rows, int64_t row) {
  return static_cast<const BFloat16*>(rows.data) + row * rows.row_stride;
}

// Rows as tiles of A: block (row / 32, column / 32), rows of both tiles one after the other.
KP_PRIMITIVE void pack_a(const HeadRows& rows, int64_t first, int64_t count, int64_t size, char* to) {
  for (int64_t i = 0; i < blocks_of(count) * kBlock; ++i) {
    char* block = to + i / kBlock * blocks_of(size) * kBlockBytes + i % kBlock * cpu::kAmxRowBytes;
    for (int64_t column = 0; column < size; column += kBlock) {
      const cpu::VecU words = i < count ? load_words(row_of(rows, first + i), column, size) : cpu::VecU{};
      cpu::store_storage(block + column / kBlock * kBlockBytes, words);
    }
  }
}

// Sixteen vectors of words transposed.
KP_PRIMITIVE void transpose_words(cpu::VecU (&words)[16]) {
  Vec rows[kLanes];
  for (int i = 0; i < 16; ++i) rows[i] = cpu::from_bits(words[i]);
  cpu::transpose(rows);
  for (int i = 0; i < 16; ++i) words[i] = cpu::bits_of(rows[i]);
}

// The transpose of rows as tiles of B: block (row / 32, column / 32) of pairs of columns; its tiles are 16 rows each.
KP_PRIMITIVE void pack_b_transposed(const HeadRows& rows, int64_t begin, int64_t end, int64_t size, char* to) {
  for (int64_t row = begin; row < round_up(end, kBlock); row += 16) {
    char* block = to + row / kBlock * blocks_of(size) * kBlockBytes + row % kBlock / 16 * cpu::kAmxTileBytes;
    for (int64_t column = 0; column < size; column += kBlock) {
      cpu::VecU words[16];
      for (int i = 0; i < 16; ++i) {
        words[i] = row + i < end ? load_words(row_of(rows, row + i), column, size) : cpu::VecU{};
      }
      transpose_words(words);
      char* tile = block + column / kBlock * kBlockBytes;
      for (int i = 0; i < 16; ++i) cpu::store_storage(tile + i * cpu::kAmxRowBytes, words[i]);
    }
  }
}

// Rows as tiles of B: block (row / 32, column / 32) of pairs of rows; its tiles are 16 columns each.
KP_PRIMITIVE void pack_b(const HeadRows& rows, int64_t begin, int64_t end, int64_t size, char* to) {
  for (int64_t row = begin; row < round_up(end, kBlock); row += 2) {
    char* block = to + row / kBlock * blocks_of(size) * kBlockBytes + row % kBlock / 2 * cpu::kAmxRowBytes;
    for (int64_t column = 0; column < size; column += kBlock) {
      const cpu::VecU even = row < end ? load_words(row_of(rows, row), column, size) : cpu::VecU{};
      const cpu::VecU odd = row + 1 < end ? load_words(row_of(rows, row + 1), column, size) : cpu::VecU{};
      const auto first = reinterpret_cast<cpu::VecU16x2>(even), second = reinterpret_cast<cpu::VecU16x2>(odd);
      char* tile = block + column / kBlock * kBlockBytes;
      cpu::store_storage(
          tile, __builtin_shufflevector(first, second, 0, 32, 1, 33, 2, 34, 3, 35, 4, 36, 5, 37, 6, 38, 7, 39, 8, 40, 9,
                                        41, 10, 42, 11, 43, 12, 44, 13, 45, 14, 46, 15, 47));
      cpu::store_storage(
          tile + cpu::kAmxTileBytes,
          __builtin_shufflevector(first, second, 16, 48, 17, 49, 18, 50, 19, 51, 20, 52, 21, 53, 22, 54, 23, 55, 24, 56,
                                  25, 57, 26, 58, 27, 59, 28, 60, 29, 61, 30, 62, 31, 63));
    }
  }
}

// tile (+)= rows * keys^T, 32 x 32 at a time, wherever a row of the 32 sees a key: `a` and `b` are packed blocks.
KP_PRIMITIVE void multiply_blocks_by_keys(const ScoreRules& rules, const Tile& tile, const char* a, const char* b,
                                          int64_t size, float* scores) {
  const int64_t depth = blocks_of(size), stride_bytes = tile.stride * 4;
  const Columns seen = columns_of_tile(rules, tile);
  for (int64_t column = round_down(seen.begin, kBlock); column < seen.end; column += kBlock) {
    for (int64_t row = 0; row < tile.rows; row += kBlock) {
      const Columns any = columns_of_rows(rules, tile, row, kBlock);
      if (any.begin >= column + kBlock || any.end <= column) continue;
      cpu::multiply_bfloat16_blocks(a + row / kBlock * depth * kBlockBytes, kBlockBytes,
                                    b + column / kBlock * depth * kBlockBytes, kBlockBytes, depth,
                                    {scores + row * tile.stride + column, stride_bytes, 64, 16 * stride_bytes}, false);
    }
  }
}

// sums += tile * rows: `a` holds the tile's blocks (row / 32, column / 32), `b` those of rows (key / 32, column / 32).
KP_PRIMITIVE void multiply_blocks_by_rows(const ScoreRules& rules, const Tile& tile, const char* a, const char* b,
                                          int64_t size, float* sums, int64_t sum_stride) {
  const int64_t columns = blocks_of(size), stride_bytes = sum_stride * 4,
                a_row_bytes = tile.columns / kBlock * kBlockBytes;
  for (int64_t row = 0; row < tile.rows; row += kBlock) {
    const Columns any = columns_of_rows(rules, tile, row, kBlock);
    if (any.begin >= any.end) continue;
    const int64_t first = any.begin / kBlock, steps = blocks_of(any.end) - first;
    for (int64_t column = 0; column < columns; ++column) {
      cpu::multiply_bfloat16_blocks(a + row / kBlock * a_row_bytes + first * kBlockBytes, kBlockBytes,
                                    b + (first * columns + column) * kBlockBytes, columns * kBlockBytes, steps,
                                    {sums + row * sum_stride + column * kBlock, stride_bytes, 64, 16 * stride_bytes},
                                    true);
    }
  }
}

// Columns of a row that it does not see, as far as blocks of its neighbours reach.
KP_PRIMITIVE void hide_columns(float* scores, Columns seen, int64_t begin, int64_t end) {
  mask_edges(scores, seen);
  const Vec hidden = cpu::broadcast(kMinusInfinity);
  for (int64_t j = begin; j < round_down(seen.begin, kLanes); j += kLanes) cpu::store(scores + j, hidden);
  for (int64_t j = round_up(seen.end, kLanes); j < end; j += kLanes) cpu::store(scores + j, hidden);
}

// Packed blocks of a key: its elements in bf16, as floats.
KP_PRIMITIVE int64_t packed_key_floats(int64_t size) {
  return blocks_of(size) * kBlock / 2;
}
KP_PRIMITIVE const char* blocks_at(const float* packed, int64_t first_key, int64_t size) {
  return reinterpret_cast<const char*>(packed + first_key * packed_key_floats(size));
}

// Scores times a factor, where what follows cannot take it along.
KP_PRIMITIVE void scale_tile(const ScoreRules& rules, const Tile& tile, float* scores, float factor) {
  for (int64_t row = 0; row < tile.rows; ++row) {
    const Columns seen = columns_of_row(rules, tile, row);
    float* of_row = scores + row * tile.stride;
    for (int64_t j = round_down(seen.begin, kLanes); j < seen.end; j += kLanes) {
      cpu::store(of_row + j, cpu::load(of_row + j) * factor);
    }
  }
}

// attention/cpu/amx_backward_isa.cpp
int64_t amx_gradient_floats(int64_t size);
int64_t amx_backward_buffer_floats(int64_t size, int64_t value_size);
void amx_backward(const BackwardTask& task);
void amx_write_gradient(const GradientTask& task);

}  // namespace kernel_pytorch::attention::KP_ISA_NAMESPACE

#endif
