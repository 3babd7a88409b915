// kp-isa: v4bf16
// Few rows of bf16 times many columns that lie in memory one after the other, with lanes that multiply pairs: both are
// read as they lie, nothing is widened or packed. Eight columns are dot products with two rows at a time, and stay in
// the first cache for the next two rows, while the columns after them are asked for. From 17 rows on these are packed,
// and lanes are rows: a word of a column is multiplied with all of them.
#include "kernel_pytorch/cpu/bfloat16_pairs.h"
#include "kernel_pytorch/cpu/pair_product.h"
#include "kernel_pytorch/ops/matmul/cpu/bfloat16_isa.h"
#include "kernel_pytorch/ops/matmul/cpu/epilogue_isa.h"
#include "kernel_pytorch/ops/matmul/cpu/thin_dots.h"

#if defined(__AVX512F__)

namespace kernel_pytorch::matmul::KP_ISA_NAMESPACE {
namespace {

using cpu::VecU;

constexpr int64_t kRowsAtOnce = 2, kColumnsAtOnce = 8;
// Steps of k at a time: 4 KB of a row or column, so that ten of them, whose distance is often a power of two and then
// the same sets of the first cache, take no more ways than it has.
constexpr int64_t kBlockSteps = 2048;

struct Steps {
  int64_t begin, end;
};
// Columns after these, whose lines are wanted in the second cache.
struct Ahead {
  const BFloat16* first;
  int64_t columns;
};

// Neighbouring lanes of two vectors, added up: each 128 bits hold two sums of a and two of b, in turn.
KP_PRIMITIVE Vec add_neighbours(Vec a, Vec b) {
  return __builtin_shufflevector(a, b, 0, 16, 1, 17, 4, 20, 5, 21, 8, 24, 9, 25, 12, 28, 13, 29) +
         __builtin_shufflevector(a, b, 2, 18, 3, 19, 6, 22, 7, 23, 10, 26, 11, 27, 14, 30, 15, 31);
}
// The sums over the lanes of four vectors: a quarter of the shuffles of one after the other.
KP_PRIMITIVE cpu::Vec4 sums_of_four(const Vec* vectors) {
  const Vec first = add_neighbours(vectors[0], vectors[1]), second = add_neighbours(vectors[2], vectors[3]);
  const Vec all = __builtin_shufflevector(first, second, 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29) +
                  __builtin_shufflevector(first, second, 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31);
  cpu::Vec4 parts[4];
  __builtin_memcpy(parts, &all, sizeof(all));
  return (parts[0] + parts[1]) + (parts[2] + parts[3]);
}

// sums (+)= the products of some steps.
template <int kRows, int kColumns>
[[gnu::noinline]] void dot(const BFloat16* few, int64_t few_stride, const BFloat16* many, int64_t stride,
                           const Steps& steps, const Ahead& ahead, float* sums, int64_t sums_stride) {
  Vec totals[kRows][kColumns] = {};
  const auto add = [&](const auto& load) {
    VecU values[kColumns];
#pragma GCC unroll 8
    for (int j = 0; j < kColumns; ++j) values[j] = load(many + j * stride);
#pragma GCC unroll 2
    for (int i = 0; i < kRows; ++i) {
      const VecU factor = load(few + i * few_stride);
#pragma GCC unroll 8
      for (int j = 0; j < kColumns; ++j) totals[i][j] = cpu::add_dots(totals[i][j], factor, values[j]);
    }
  };
  int64_t step = steps.begin;
  for (; step + kWords <= steps.end; step += kWords) {
    for (int64_t j = 0; j < ahead.columns; ++j) cpu::prefetch_far(ahead.first + j * stride + step);
    add([&](const BFloat16* from) { return cpu::load_storage<VecU>(from + step); });
  }
  if (step < steps.end) {
    add([&](const BFloat16* from) { return load_words(from + step, steps.end - step, Part::kHigh); });
  }
  for (int i = 0; i < kRows; ++i, sums += sums_stride) {
    if constexpr (kColumns == 1) {
      *sums = (steps.begin > 0 ? *sums : 0.0f) + cpu::horizontal_sum(totals[i][0]);
    } else {
#pragma GCC unroll 2
      for (int j = 0; j < kColumns; j += 4) {
        cpu::Vec4 four = sums_of_four(&totals[i][j]);
        if (steps.begin > 0) four += cpu::load_storage<cpu::Vec4>(sums + j);
        cpu::store_storage(sums + j, four);
      }
    }
  }
}

// A group of rows, all steps of a block after the other; every group asks for its share of the next columns. With one
// group there is no time to ask in, and the machine's own prefetching reads faster alone.
template <int kColumns>
void dot_rows(const ThinDotsTask& task, int64_t column) {
  const int64_t stride = task.many.column_stride, few_stride = task.few.row_stride;
  const BFloat16* many = static_cast<const BFloat16*>(task.many.data) + column * stride;
  const int64_t groups = (task.count + kRowsAtOnce - 1) / kRowsAtOnce;
  const int64_t coming = groups == 1 ? 0 : smaller(kColumns, task.columns - column - kColumns);
  for (Steps steps{0, 0}; steps.begin == 0 || steps.begin < task.steps; steps.begin += kBlockSteps) {
    steps.end = smaller(task.steps, steps.begin + kBlockSteps);
    for (int64_t group = 0; group < groups; ++group) {
      const int64_t row = group * kRowsAtOnce, first = coming * group / groups, last = coming * (group + 1) / groups;
      const BFloat16* few = static_cast<const BFloat16*>(task.few.data) + row * few_stride;
      const Ahead ahead{many + (kColumns + first) * stride, last - first};
      float* sums = task.sums + row * task.sums_stride + column;
      if (row + kRowsAtOnce <= task.count) {
        dot<kRowsAtOnce, kColumns>(few, few_stride, many, stride, steps, ahead, sums, task.sums_stride);
      } else {
        dot<1, kColumns>(few, few_stride, many, stride, steps, ahead, sums, task.sums_stride);
      }
    }
  }
}

}  // namespace

void multiply_thin_dots(const ThinDotsTask& task) {
  int64_t column = 0;
  for (; column + kColumnsAtOnce <= task.columns; column += kColumnsAtOnce) dot_rows<kColumnsAtOnce>(task, column);
  for (; column < task.columns; ++column) dot_rows<1>(task, column);
}

void pack_panel(const PanelTask& task) {
  const auto* from = static_cast<const uint16_t*>(task.from.data);
  const int64_t row_stride = task.from.row_stride, step_stride = task.from.column_stride;
  for (int64_t pair = 0; pair < task.steps / 2; ++pair) {
    uint32_t* to = task.to + pair * task.padded;
    const uint16_t* own = from + 2 * pair * step_stride;
    for (int64_t i = 0; i < task.count; ++i, own += row_stride) to[i] = own[0] | uint32_t{own[step_stride]} << 16;
    for (int64_t i = task.count; i < task.padded; ++i) to[i] = 0;
  }
}

void multiply_panel(const PanelDotsTask& task) {
  constexpr int64_t kPanelSteps = 1024;  // of the few, 128 KB of the second cache
  const auto* many = static_cast<const uint32_t*>(task.many.data);
  const int64_t stride = task.many.column_stride / 2, last = task.columns - cpu::kTileRows;
  for (int64_t begin = 0; begin < task.steps; begin += kPanelSteps) {
    const int64_t pairs = smaller(kPanelSteps, task.steps - begin) / 2;
    const uint32_t* few = task.few + begin / 2 * task.padded;
    for (int64_t column = 0; column < task.columns; column += cpu::kTileRows) {
      const cpu::PairsOfA own{many + smaller(column, last) * stride + begin / 2, stride, 1};
      const cpu::ProductC sums{task.sums + column * task.padded, task.padded};
      cpu::with_vectors(task.padded / kLanes, [&]<int kVectors>() {
        cpu::multiply_pair_tile<kVectors>(own, few, task.padded, pairs, sums, begin > 0);
      });
    }
  }
  // The last tile began where it ends with the last column.
  const int64_t rest = task.columns % cpu::kTileRows, again = (cpu::kTileRows - rest) % cpu::kTileRows;
  float* to = task.sums + (task.columns - rest) * task.padded;
  for (int64_t i = 0; again > 0 && i < rest * task.padded; ++i) to[i] = to[i + again * task.padded];
}

void turn_panel(const float* from, int64_t padded, int64_t columns, float* to, int64_t to_stride) {
  for (int64_t column = 0; column < columns; column += kLanes) {
    for (int64_t row = 0; row < padded; row += kLanes) {
      Vec lanes[kLanes];
      for (int i = 0; i < kLanes; ++i) lanes[i] = cpu::load(from + (column + i) * padded + row);
      cpu::transpose(lanes);
      for (int i = 0; i < kLanes; ++i) cpu::store(to + (row + i) * to_stride + column, lanes[i]);
    }
  }
}

}  // namespace kernel_pytorch::matmul::KP_ISA_NAMESPACE

#endif
