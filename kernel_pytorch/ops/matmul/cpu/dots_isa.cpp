// kp-isa: v4bf16
// Products of bf16 on lanes that multiply pairs: 6 x 64 sums in registers, as in tiles_isa.cpp, with two steps of k per
// instruction. A tile of A is [k / 2][6] pairs, a panel of B [k / 2][64] pairs. Takes bf16 tensors, and fp32 ones whose
// caller asked for bf16.
#include "kernel_pytorch/cpu/bfloat16_pairs.h"
#include "kernel_pytorch/cpu/tile_product.h"
#include "kernel_pytorch/ops/matmul/cpu/bfloat16_isa.h"
#include "kernel_pytorch/ops/matmul/cpu/epilogue_isa.h"

#if defined(__AVX512F__)

namespace kernel_pytorch::matmul::KP_ISA_NAMESPACE {
namespace {

using cpu::kTileColumns;
using cpu::kTileRows;
using cpu::kTileVectors;
using cpu::VecU;

constexpr int64_t kPairs = kWords / 2;  // of k, in a vector of a row
constexpr int64_t kPairBytes = 4;
constexpr int64_t kAStep = kTileRows * kPairBytes, kBStep = kTileColumns * kPairBytes;  // bytes of a pair of steps
constexpr int64_t kChainPairs = cpu::kChainSteps;                                       // summed by themselves

// The first six lanes. What the others hold is overwritten by the next pair's; at the tile's end nothing is.
KP_PRIMITIVE void store_pairs_of_a(char* to, VecU words, int64_t pairs_left) {
  if (pairs_left * kAStep >= 64) {
    cpu::store_storage(to, words);
  } else {
    __builtin_memcpy(to, &words, static_cast<size_t>(kAStep));
  }
}

template <class T>
void pack_a_rows(const PackTask& task) {
  const T* from = static_cast<const T*>(task.from.data) + task.first * task.from.row_stride + task.step;
  const int64_t pairs = (task.steps + 1) / 2;
  for (int64_t row = 0; row < task.count; row += kTileRows) {
    const int64_t rows = smaller(kTileRows, task.count - row);
    char* to = task.to + row / kTileRows * task.tile_bytes;
    for (int64_t pair = 0; pair < pairs; pair += kPairs) {
      VecU words[16] = {};
      for (int64_t i = 0; i < rows; ++i) {
        words[i] = load_words(from + (row + i) * task.from.row_stride + 2 * pair, task.steps - 2 * pair, Part::kHigh);
      }
      cpu::transpose_words(words);
      const int64_t count = smaller(kPairs, pairs - pair);
      for (int64_t i = 0; i < count; ++i) store_pairs_of_a(to + (pair + i) * kAStep, words[i], pairs - pair - i);
    }
  }
}

// A few pairs of a few tiles at a time: tiles, and often columns, are multiples of 4 KB apart, so that lines of many of
// them do not stay in the first cache together.
template <class T>
void pack_a_columns(const PackTask& task) {
  constexpr int64_t kPairsAtOnce = 8, kRowsAtOnce = 16 * kTileRows;
  const T* from = static_cast<const T*>(task.from.data) + task.first + task.step * task.from.column_stride;
  const int64_t pairs = (task.steps + 1) / 2;
  const auto pack_tile = [&](int64_t row, int64_t begin, int64_t end) {
    char* to = task.to + row / kTileRows * task.tile_bytes;
    for (int64_t pair = begin; pair < end; ++pair) {
      const cpu::Pairs found = load_pairs(from + row, task.from.column_stride, pair, task.steps,
                                          smaller(kTileRows, task.count - row), Part::kHigh);
      store_pairs_of_a(to + pair * kAStep, found.low, pairs - pair);
    }
  };
  for (int64_t first = 0; first < task.count; first += kRowsAtOnce) {
    const int64_t behind = smaller(task.count, first + kRowsAtOnce);
    for (int64_t pair = 0; pair < pairs; pair += kPairsAtOnce) {
      for (int64_t row = first; row < behind; row += kTileRows)
        pack_tile(row, pair, smaller(pairs, pair + kPairsAtOnce));
    }
  }
}

template <class T>
void pack_b_rows(const PackTask& task) {
  const T* from = static_cast<const T*>(task.from.data) + task.first + task.step * task.from.row_stride;
  const int64_t pairs = (task.steps + 1) / 2, padded = (task.count + kTileColumns - 1) / kTileColumns * kTileColumns;
  for (int64_t pair = 0; pair < pairs; ++pair) {
    for (int64_t column = 0; column < padded; column += kWords) {
      const cpu::Pairs found =
          load_pairs(from + column, task.from.row_stride, pair, task.steps, task.count - column, Part::kHigh);
      char* to = task.to + column / kTileColumns * task.tile_bytes + pair * kBStep + column % kTileColumns * kPairBytes;
      cpu::store_storage(to, found.low);
      cpu::store_storage(to + 64, found.high);
    }
  }
}

template <class T>
void pack_b_columns(const PackTask& task) {
  const T* from = static_cast<const T*>(task.from.data) + task.first * task.from.column_stride + task.step;
  const int64_t pairs = (task.steps + 1) / 2, padded = (task.count + kTileColumns - 1) / kTileColumns * kTileColumns;
  for (int64_t column = 0; column < padded; column += 16) {
    char* to = task.to + column / kTileColumns * task.tile_bytes + column % kTileColumns * kPairBytes;
    const int64_t columns = task.count - column;
    for (int64_t pair = 0; pair < pairs; pair += kPairs) {
      VecU words[16] = {};
      for (int64_t i = 0; i < smaller(16, columns); ++i) {
        words[i] =
            load_words(from + (column + i) * task.from.column_stride + 2 * pair, task.steps - 2 * pair, Part::kHigh);
      }
      cpu::transpose_words(words);
      const int64_t count = smaller(kPairs, pairs - pair);
      for (int64_t i = 0; i < count; ++i) cpu::store_storage(to + (pair + i) * kBStep, words[i]);
    }
  }
}

template <class T>
void pack_a_of(const PackTask& task) {
  task.from.column_stride == 1 ? pack_a_rows<T>(task) : pack_a_columns<T>(task);
}
template <class T>
void pack_b_of(const PackTask& task) {
  task.from.column_stride == 1 ? pack_b_rows<T>(task) : pack_b_columns<T>(task);
}
void pack_dots_a(const PackTask& task) {
  task.from.dtype == DType::kFloat32 ? pack_a_of<float>(task) : pack_a_of<BFloat16>(task);
}
void pack_dots_b(const PackTask& task) {
  task.from.dtype == DType::kFloat32 ? pack_b_of<float>(task) : pack_b_of<BFloat16>(task);
}

// sums [6][kTileColumns] (+)= a tile times a panel, of which kVectors count, for at most kChainPairs.
template <int kVectors>
[[gnu::noinline]] void multiply_pairs(const char* a, const char* b, int64_t pairs, float* sums, bool add) {
  Vec totals[kTileRows][kVectors] = {};
  constexpr int64_t kAhead = 64;  // pairs of A, also into the next tile
  for (int64_t pair = 0; pair < pairs; ++pair) {
    VecU values[kVectors];
#pragma GCC unroll 4
    for (int j = 0; j < kVectors; ++j) values[j] = cpu::load_storage<VecU>(b + j * 64);
    if ((pair & 1) == 0) cpu::prefetch_near(a + kAhead * kAStep);
#pragma GCC unroll 6
    for (int i = 0; i < kTileRows; ++i) {
      uint32_t word;
      __builtin_memcpy(&word, a + i * kPairBytes, kPairBytes);
      const VecU factor = cpu::broadcast(word);
#pragma GCC unroll 4
      for (int j = 0; j < kVectors; ++j) totals[i][j] = cpu::add_dots(totals[i][j], factor, values[j]);
    }
    a += kAStep;
    b += kBStep;
  }
  cpu::store_tile(totals, sums, kTileColumns, add);
}

void multiply_at(const BlockTask& task, int64_t row, int64_t column, float* sums) {
  const int64_t columns = smaller(kTileColumns, task.columns - column), pairs = (task.steps + 1) / 2;
  const char* a = task.a + row / kTileRows * task.a_tile_bytes;
  const char* b = task.b + column / kTileColumns * task.b_panel_bytes;
  cpu::with_vectors((columns + kLanes - 1) / kLanes, [&]<int kVectors>() {
    for (int64_t pair = 0; pair < pairs || pair == 0; pair += kChainPairs) {
      multiply_pairs<kVectors>(a + pair * kAStep, b + pair * kBStep, smaller(kChainPairs, pairs - pair), sums,
                               task.add || pair > 0);
    }
  });
  if (task.is_last) {
    finish_tile(task.epilogue, sums, kTileColumns, row, smaller(kTileRows, task.rows - row), column, columns);
  }
}

// Panel by panel, so that a panel of B stays in the caches; the last block tile by tile, for long rows of the output.
void multiply_dots(const BlockTask& task) {
  const int64_t panels = (task.columns + kTileColumns - 1) / kTileColumns, stride = task.sums_tile_floats;
  const auto at = [&](int64_t row, int64_t panel) {
    multiply_at(task, row, panel * kTileColumns, task.sums + (row / kTileRows * panels + panel) * stride);
  };
  if (task.is_last) {
    for (int64_t row = 0; row < task.rows; row += kTileRows) {
      for (int64_t panel = 0; panel < panels; ++panel) at(row, panel);
    }
    if (task.epilogue.streams) cpu::stream_fence();
    return;
  }
  for (int64_t panel = 0; panel < panels; ++panel) {
    for (int64_t row = 0; row < task.rows; row += kTileRows) at(row, panel);
  }
}

}  // namespace

extern const ProductKernels kDotProductKernels;
constinit const ProductKernels kDotProductKernels{.tile_rows = kTileRows,
                                                  .panel_columns = kTileColumns,
                                                  .depth = 2,
                                                  .element_bytes = 2,
                                                  .block_steps = 1024,
                                                  .pack_a = pack_dots_a,
                                                  .pack_b = pack_dots_b,
                                                  .multiply = multiply_dots};

}  // namespace kernel_pytorch::matmul::KP_ISA_NAMESPACE

#endif
