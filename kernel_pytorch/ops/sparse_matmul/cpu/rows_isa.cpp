// A 2:4 weight on the lanes of the CPU, built once per instruction level; only kept products are computed.
// Many rows of x: a row of the weight times a panel of x, each kept value is broadcast and meets the rows of x that lie
// in its column. Few rows: kLanes kept values at a time, whose columns of x are picked out of two registers by one
// shuffle, its indices a shift of the word of metadata. The weight is read once, as it lies.
#include "kernel_pytorch/base/float_types.h"
#include "kernel_pytorch/cpu/load_store.h"
#include "kernel_pytorch/cpu/vec.h"
#include "kernel_pytorch/ops/sparse_matmul/cpu/rows.h"

namespace kernel_pytorch::sparse_matmul::KP_ISA_NAMESPACE {
namespace {

using cpu::kLanes;
using cpu::Vec;
static_assert(kPanelRows % kLanes == 0);

// Two kept values in turns, so that twice as many sums are under way.
template <int kVectors>
void multiply_vectors(const RowPart& part, int64_t first) {
  Vec even[kVectors] = {}, odd[kVectors] = {};
  for (int64_t i = 0; i + 1 < part.count; i += 2) {  // kept values come in pairs
    const Vec values[2] = {cpu::broadcast(part.values[i]), cpu::broadcast(part.values[i + 1])};
    const float* columns[2] = {part.panel + part.offsets[i] + first, part.panel + part.offsets[i + 1] + first};
    for (int v = 0; v < kVectors; ++v) even[v] = cpu::fma(values[0], cpu::load(columns[0] + v * kLanes), even[v]);
    for (int v = 0; v < kVectors; ++v) odd[v] = cpu::fma(values[1], cpu::load(columns[1] + v * kLanes), odd[v]);
  }
  for (int v = 0; v < kVectors; ++v) cpu::store(part.sums + first + v * kLanes, even[v] + odd[v]);
}

void multiply(const RowPart& part) {
  int64_t vector = 0;
  for (; vector + 4 <= part.vectors; vector += 4) multiply_vectors<4>(part, vector * kLanes);
  for (; vector + 2 <= part.vectors; vector += 2) multiply_vectors<2>(part, vector * kLanes);
  if (vector < part.vectors) multiply_vectors<1>(part, vector * kLanes);
}

// kRows rows of the weight from `first` on, kX rows of x.
template <class T, int kRows, int kX>
void few_tile(const FewPart& part, int64_t first) {
  constexpr int kWordColumns = 32, kParts = kWordColumns / (2 * kLanes);
  static_assert(kParts > 0);
  cpu::VecU lane{};
  for (int i = 0; i < kLanes; ++i) lane[i] = static_cast<uint32_t>(i);
  const cpu::VecU two = 2 * lane, base = (lane >> 1) << 2;  // a value's bits in the word, its group's first column
  const int64_t kept = part.columns / 2, words = (part.columns + kWordColumns - 1) / kWordColumns;
  const T* values = static_cast<const T*>(part.values) + first * kept;
  Vec sums[kRows][kX] = {};
  for (int64_t word = 0; word < words; ++word) {
    const uint32_t* metadata = part.metadata + word / 2 * part.block_stride + 2 * first + word % 2;
    if (word % 2 == 0) cpu::prefetch_near(metadata + 4 * part.block_stride);  // rows of metadata are far apart
    for (int sub = 0; sub < kParts; ++sub) {
      const int64_t column = word * kWordColumns + sub * 2 * kLanes, place = column / 2;
      Vec x[kX][2];
      for (int i = 0; i < kX; ++i) {
        for (int half = 0; half < 2; ++half)
          x[i][half] = cpu::load(part.x + i * part.x_stride + column + half * kLanes);
      }
      const bool is_whole = place + kLanes <= kept;
      if (!is_whole && place >= kept) break;
      for (int row = 0; row < kRows; ++row) {
        // Rows of the weight may be whole pages, at whose ends the processor stops to fetch ahead by itself.
        if (sub == 0) cpu::prefetch_near(values + (row + kRows) * kept + place);
        const cpu::VecU places = cpu::broadcast(metadata[2 * row] >> (sub * 2 * kLanes)) >> two;
        const auto picked = reinterpret_cast<cpu::VecI>((places & 3u) + base);
        const T* from = values + row * kept + place;
        const Vec weight = is_whole ? cpu::load(from) : cpu::load_partial(from, kept - place);
        for (int i = 0; i < kX; ++i) {
          sums[row][i] = cpu::fma(weight, __builtin_shuffle(x[i][0], x[i][1], picked), sums[row][i]);
        }
      }
    }
  }
  for (int row = 0; row < kRows; ++row) {
    for (int i = 0; i < kX; ++i) part.sums[(first + row) * kFewRows + i] = cpu::horizontal_sum(sums[row][i]);
  }
}

template <class T, int kX>
void few_of(const FewPart& part) {
  constexpr int kRows = kX == 1 ? kTileRows : kTileRows / 2;
  int64_t row = 0;
  for (; row + kRows <= part.rows; row += kRows) few_tile<T, kRows, kX>(part, row);
  for (; row < part.rows; ++row) few_tile<T, 1, kX>(part, row);
}

template <class T>
void few(const FewPart& part) {
  part.x_rows == 1 ? few_of<T, 1>(part) : part.x_rows == 2 ? few_of<T, 2>(part) : few_of<T, kFewRows>(part);
}

}  // namespace

constinit const RowKernels kRowKernels{
    .lanes = kLanes, .multiply = multiply, .few = {few<float>, few<BFloat16>, few<Float16>}};

}  // namespace kernel_pytorch::sparse_matmul::KP_ISA_NAMESPACE
