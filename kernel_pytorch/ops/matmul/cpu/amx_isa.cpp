// kp-isa: v4amx
// Products of bf16 on AMX tiles, 32 x 32 sums at a time, of bf16 tensors and of fp32 ones whose caller asked for it.
// Both operands are packed as tiles of 16 rows of 64 bytes: A by rows (32 of k), B by pairs of k. kBf16x3 packs every
// 32 of k three times, A as (high, high, low) and B as (high, low, high) parts, so that their products add up to nearly
// fp32's.
#include "kernel_pytorch/cpu/amx.h"
#include "kernel_pytorch/ops/matmul/cpu/bfloat16_isa.h"
#include "kernel_pytorch/ops/matmul/cpu/epilogue_isa.h"

#if defined(__AVX512F__)  // whoever has tiles has these lanes

namespace kernel_pytorch::matmul::KP_ISA_NAMESPACE {
namespace {

using cpu::kAmxRowBytes;
using cpu::kAmxTileBytes;
using cpu::Pairs;
using cpu::transpose_words;
using cpu::VecU;

constexpr int64_t kBlock = 32;  // rows or columns of a packed block, and its steps of k
constexpr int64_t kBlockBytes = 2 * kAmxTileBytes;
static_assert(kBlock == kWords);
constexpr Part kPartsOfA[3] = {Part::kHigh, Part::kHigh, Part::kLow};
constexpr Part kPartsOfB[3] = {Part::kHigh, Part::kLow, Part::kHigh};

// A 32 x 32 block of memory, rows `stride` apart, of which `rows` and `columns` exist.
//   straight: rows as they are           A by rows
//   words:    pairs of columns, turned   B by columns (its rows are k)
//   pairs:    pairs of rows              B by rows
//   turned:   pairs of rows, turned      A by columns
template <class T>
KP_PRIMITIVE void pack_straight(const T* from, int64_t stride, int64_t rows, int64_t columns, Part part, char* to) {
  for (int64_t i = 0; i < kBlock; ++i) {
    const VecU words = i < rows ? load_words(from + i * stride, columns, part) : VecU{};
    cpu::store_storage(to + i * kAmxRowBytes, words);
  }
}
template <class T>
KP_PRIMITIVE void pack_words(const T* from, int64_t stride, int64_t rows, int64_t columns, Part part, char* to) {
  for (int64_t tile = 0; tile < 2; ++tile) {
    VecU words[16];
    for (int64_t i = 0; i < 16; ++i) {
      const int64_t row = tile * 16 + i;
      words[i] = row < rows ? load_words(from + row * stride, columns, part) : VecU{};
    }
    transpose_words(words);
    for (int64_t i = 0; i < 16; ++i) cpu::store_storage(to + tile * kAmxTileBytes + i * kAmxRowBytes, words[i]);
  }
}
template <class T>
KP_PRIMITIVE void pack_pairs(const T* from, int64_t stride, int64_t rows, int64_t columns, Part part, char* to) {
  for (int64_t pair = 0; pair < 16; ++pair) {
    const Pairs pairs = load_pairs(from, stride, pair, rows, columns, part);
    cpu::store_storage(to + pair * kAmxRowBytes, pairs.low);
    cpu::store_storage(to + kAmxTileBytes + pair * kAmxRowBytes, pairs.high);
  }
}
template <class T>
KP_PRIMITIVE void pack_turned(const T* from, int64_t stride, int64_t rows, int64_t columns, Part part, char* to) {
  VecU low[16], high[16];
  for (int64_t pair = 0; pair < 16; ++pair) {
    const Pairs pairs = load_pairs(from, stride, pair, rows, columns, part);
    low[pair] = pairs.low;
    high[pair] = pairs.high;
  }
  transpose_words(low);
  transpose_words(high);
  for (int64_t i = 0; i < 16; ++i) {
    cpu::store_storage(to + i * kAmxRowBytes, low[i]);
    cpu::store_storage(to + kAmxTileBytes + i * kAmxRowBytes, high[i]);
  }
}

// Every block of 32 steps, once for each part.
template <class PackBlock>
KP_PRIMITIVE void for_blocks(const PackTask& task, const Part* parts, const PackBlock& pack_block) {
  const int terms = task.precision == Precision::kBf16x3 ? 3 : 1;
  for (int64_t i = 0; i < task.count; i += kBlock) {
    char* to = task.to + i / kBlock * task.tile_bytes;
    for (int64_t step = 0; step < task.steps; step += kBlock) {
      for (int term = 0; term < terms; ++term) {
        pack_block(i, step, parts[term], to);
        to += kBlockBytes;
      }
    }
  }
}

template <class T>
void pack_a_of(const PackTask& task) {
  const T* from =
      static_cast<const T*>(task.from.data) + task.first * task.from.row_stride + task.step * task.from.column_stride;
  const bool by_rows = task.from.column_stride == 1;
  for_blocks(task, kPartsOfA, [&](int64_t row, int64_t step, Part part, char* to) {
    const T* block = from + row * task.from.row_stride + step * task.from.column_stride;
    const int64_t rows = smaller(kBlock, task.count - row), steps = smaller(kBlock, task.steps - step);
    by_rows ? pack_straight(block, task.from.row_stride, rows, steps, part, to)
            : pack_turned(block, task.from.column_stride, steps, rows, part, to);
  });
}
template <class T>
void pack_b_of(const PackTask& task) {
  const T* from =
      static_cast<const T*>(task.from.data) + task.first * task.from.column_stride + task.step * task.from.row_stride;
  const bool by_rows = task.from.column_stride == 1;
  for_blocks(task, kPartsOfB, [&](int64_t column, int64_t step, Part part, char* to) {
    const T* block = from + column * task.from.column_stride + step * task.from.row_stride;
    const int64_t columns = smaller(kBlock, task.count - column), steps = smaller(kBlock, task.steps - step);
    by_rows ? pack_pairs(block, task.from.row_stride, steps, columns, part, to)
            : pack_words(block, task.from.column_stride, columns, steps, part, to);
  });
}
void pack_amx_a(const PackTask& task) {
  task.from.dtype == DType::kFloat32 ? pack_a_of<float>(task) : pack_a_of<BFloat16>(task);
}
void pack_amx_b(const PackTask& task) {
  task.from.dtype == DType::kFloat32 ? pack_b_of<float>(task) : pack_b_of<BFloat16>(task);
}

void multiply_amx(const BlockTask& task) {
  float* sums = task.sums;
  for (int64_t row = 0; row < task.rows; row += kBlock) {
    const char* a = task.a + row / kBlock * task.a_tile_bytes;
    for (int64_t column = 0; column < task.columns; column += kBlock) {
      const char* b = task.b + column / kBlock * task.b_panel_bytes;
      constexpr int64_t kSumsStride = kBlock * 4;
      cpu::multiply_bfloat16_blocks(a, kBlockBytes, b, kBlockBytes, task.steps / kBlock,
                                    {sums, kSumsStride, kAmxRowBytes, 16 * kSumsStride}, task.add);
      if (task.is_last) {
        finish_tile(task.epilogue, sums, kBlock, row, smaller(kBlock, task.rows - row), column,
                    smaller(kBlock, task.columns - column));
      }
      sums += task.sums_tile_floats;
    }
  }
  if (task.is_last && task.epilogue.streams) cpu::stream_fence();
}

void begin_tiles() {
  cpu::configure_tiles();
}
void end_tiles() {
  cpu::release_tiles();
}

}  // namespace

extern const ProductKernels kAmxProductKernels;
constinit const ProductKernels kAmxProductKernels{.tile_rows = kBlock,
                                                  .panel_columns = kBlock,
                                                  .depth = kBlock,
                                                  .element_bytes = 2,
                                                  .block_steps = 1024,
                                                  .chunk_rows = 256,
                                                  .group_panels = 8,
                                                  .solo_rows = 512,
                                                  .splits_bfloat16 = true,
                                                  .pack_a = pack_amx_a,
                                                  .pack_b = pack_amx_b,
                                                  .multiply = multiply_amx,
                                                  .begin = begin_tiles,
                                                  .end = end_tiles};

}  // namespace kernel_pytorch::matmul::KP_ISA_NAMESPACE

#endif
