// Products of matrices rounded to bf16 by register tiles of kTileRows x kTileColumns sums in fp32, two steps of the sum
// per instruction. Operands are packed first, from fp32: a word has the elements of two neighbouring steps. Only where
// the machine has the instruction: elsewhere it would be slower than fp32 (tile_product.h).
#pragma once

#include "kernel_pytorch/cpu/bfloat16_pairs.h"

#if defined(__AVX512BF16__)

namespace kernel_pytorch::cpu {
inline namespace KP_ISA_NAMESPACE {

struct PairsOfA {
  const uint32_t* words;
  int64_t row_stride, step_stride;  // in words, between rows of the result and between pairs of steps
};

// Words of neighbouring steps of `columns` columns, which are whole vectors and may be read: [steps / 2][columns].
// A step behind the last is zeros.
[[gnu::noinline, maybe_unused]] static void pack_step_pairs(const float* from, int64_t step_stride, int64_t steps,
                                                            int64_t columns, uint32_t* to) {
  for (int64_t step = 0; step < steps; step += 2, to += columns) {
    const float* row = from + step * step_stride;
    for (int64_t j = 0; j < columns; j += kLanes) {
      const Vec second = step + 1 < steps ? load(row + step_stride + j) : Vec{};
      store_storage(to + j, to_bfloat16_pairs(load(row + j), second));
    }
  }
}
// The same of rows whose steps are neighbours: [rows][pitch], pitch = pairs_pitch(steps).
KP_PRIMITIVE int64_t pairs_pitch(int64_t steps) {
  return (steps + 2 * kLanes - 1) / (2 * kLanes) * kLanes;
}
[[gnu::noinline, maybe_unused]] static void pack_row_pairs(const float* from, int64_t row_stride, int64_t rows,
                                                           int64_t steps, uint32_t* to) {
  for (int64_t i = 0; i < rows; ++i, from += row_stride, to += pairs_pitch(steps)) {
    int64_t step = 0;
    for (; step + 2 * kLanes <= steps; step += 2 * kLanes) {
      store_storage(to + step / 2, to_bfloat16(load(from + step), load(from + step + kLanes)));
    }
    if (step == steps) continue;
    const int64_t left = steps - step;
    const Vec low = left < kLanes ? load_partial(from + step, left) : load(from + step);
    const Vec high = left > kLanes ? load_partial(from + step + kLanes, left - kLanes) : Vec{};
    store_storage(to + step / 2, to_bfloat16(low, high));
  }
}

// C[6, kVectors * kLanes] = A B over `pairs` of steps, added to what C holds if `add`.
template <int kVectors>
[[gnu::noinline, maybe_unused]] static void multiply_pair_tile(const PairsOfA& a, const uint32_t* b, int64_t b_stride,
                                                               int64_t pairs, const ProductC& c, bool add) {
  Vec sums[kTileRows][kVectors] = {};
  const uint32_t* rows = a.words;
  const uint32_t* late_rows = a.words + 3 * a.row_stride;  // two bases reach six rows with scaled strides
  const int64_t stride = a.row_stride;
  for (int64_t pair = 0; pair < pairs; ++pair) {
    VecU values[kVectors];
#pragma GCC unroll 4
    for (int j = 0; j < kVectors; ++j) __builtin_memcpy(&values[j], b + j * kLanes, sizeof(VecU));
#pragma GCC unroll 6
    for (int i = 0; i < kTileRows; ++i) {
      const uint32_t word = i < 3 ? rows[i * stride] : late_rows[(i - 3) * stride];
      const VecU factor = VecU{} + word;
#pragma GCC unroll 4
      for (int j = 0; j < kVectors; ++j) sums[i][j] = add_dots(sums[i][j], factor, values[j]);
    }
    rows += a.step_stride;
    late_rows += a.step_stride;
    b += b_stride;
  }
  store_tile(sums, c.data, c.row_stride, add);
}

}  // namespace KP_ISA_NAMESPACE
}  // namespace kernel_pytorch::cpu

#endif
