// One block of a scaled product on the lanes of the CPU, built once per instruction level: codes of 128 of k become
// floats (those of b transposed, a panel per register tile), register tiles multiply them, and with block scales each
// 128 are scaled before they are added.
#include "kernel_pytorch/base/float_types.h"
#include "kernel_pytorch/cpu/load_store.h"
#include "kernel_pytorch/cpu/tile_product.h"
#include "kernel_pytorch/cpu/vec.h"
#include "kernel_pytorch/ops/scaled_matmul/cpu/block.h"

namespace kernel_pytorch::scaled_matmul::KP_ISA_NAMESPACE {
namespace {

using cpu::kLanes;
using cpu::kTileColumns;
using cpu::kTileRows;
using cpu::Vec;

static_assert(kBlockRows % kTileRows == 0 && kBlockColumns % kTileColumns == 0 && kStepK % kLanes == 0);

// [kBlockRows, kStepK]; rows up to a whole register tile and steps up to whole vectors are zeros.
template <class T>
void decode_rows(const CodeRows& codes, int64_t first_row, int64_t rows, int64_t first_k, int64_t steps, float* to) {
  const int64_t whole_rows = (rows + kTileRows - 1) / kTileRows * kTileRows;
  for (int64_t i = 0; i < whole_rows; ++i) {
    const auto* row = reinterpret_cast<const T*>(codes.data) + (first_row + i) * codes.row_stride + first_k;
    for (int64_t step = 0; step < steps; step += kLanes) {
      const int64_t lanes = i >= rows ? 0 : steps - step < kLanes ? steps - step : kLanes;
      cpu::store(to + i * kStepK + step, lanes == kLanes ? cpu::load(row + step)
                                         : lanes == 0    ? Vec{}
                                                         : cpu::load_partial(row + step, lanes));
    }
  }
}

// Panels [kStepK, kTileColumns], one after another; columns past the last are zeros.
template <class T>
void decode_panels(const CodeRows& codes, int64_t first_row, int64_t rows, int64_t first_k, int64_t steps, float* to) {
  for (int64_t column = 0; column < rows; column += kLanes) {
    float* panel = to + column / kTileColumns * kStepK * kTileColumns + column % kTileColumns;
    for (int64_t step = 0; step < steps; step += kLanes) {
      const int64_t lanes = steps - step < kLanes ? steps - step : kLanes;
      Vec square[kLanes];
      for (int i = 0; i < kLanes; ++i) {
        const auto* row =
            reinterpret_cast<const T*>(codes.data) + (first_row + column + i) * codes.row_stride + first_k;
        square[i] = column + i >= rows ? Vec{}
                    : lanes == kLanes  ? cpu::load(row + step)
                                       : cpu::load_partial(row + step, lanes);
      }
      cpu::transpose(square);
      for (int64_t i = 0; i < lanes; ++i) cpu::store(panel + (step + i) * kTileColumns, square[i]);
    }
  }
}

void decode(const CodeRows& codes, bool as_panels, int64_t first_row, int64_t rows, int64_t first_k, int64_t steps,
            float* to) {
  const auto run = as_panels ? (codes.is_e5m2 ? decode_panels<Float8E5M2> : decode_panels<Float8E4M3>)
                             : (codes.is_e5m2 ? decode_rows<Float8E5M2> : decode_rows<Float8E4M3>);
  run(codes, first_row, rows, first_k, steps, to);
}

void multiply_step(const BlockProduct& block, const float* a, const float* b, int64_t steps, float* sums, bool add) {
  for (int64_t column = 0; column < block.columns; column += kTileColumns) {
    const int64_t left = block.columns - column;
    const int vectors = static_cast<int>((left < kTileColumns ? left + kLanes - 1 : kTileColumns) / kLanes);
    for (int64_t row = 0; row < block.rows; row += kTileRows) {
      cpu::multiply_tile(vectors, {a + row * kStepK, kStepK, 1}, {b + column * kStepK, kTileColumns}, steps,
                         {sums + row * kBlockColumns + column, kBlockColumns}, add);
    }
  }
}

KP_PRIMITIVE float scale_at(const ScaleRows& scale, int64_t row, int64_t block) {
  return scale.data[row / scale.rows_each * scale.row_stride + block * scale.block_stride];
}

// totals (+)= sums * scale_a * scale_b, the scales being those of one block of k.
void scale_sums(const BlockProduct& block, int64_t k_block, const float* sums, float* totals, bool add) {
  alignas(64) float column_scales[kBlockColumns] = {};
  for (int64_t j = 0; j < block.columns; ++j) {
    column_scales[j] = scale_at(block.scale_b, block.first_column + j, k_block);
  }
  for (int64_t i = 0; i < block.rows; ++i) {
    const float row_scale = scale_at(block.scale_a, block.first_row + i, k_block);
    for (int64_t j = 0; j < block.columns; j += kLanes) {
      float* total = totals + i * kBlockColumns + j;
      const Vec scaled = cpu::load(sums + i * kBlockColumns + j) * (cpu::load(column_scales + j) * row_scale);
      cpu::store(total, add ? cpu::load(total) + scaled : scaled);
    }
  }
}

// NaN is passed over: of the two operands max returns the second where one is NaN.
template <class T>
float store_rows(const BlockProduct& block, const float* totals) {
  Vec largest = {};
  for (int64_t i = 0; i < block.rows; ++i) {
    T* row = static_cast<T*>(block.output) + i * block.output_stride;
    for (int64_t j = 0; j < block.columns; j += kLanes) {
      const int64_t lanes = block.columns - j < kLanes ? block.columns - j : kLanes;
      Vec value = cpu::load(totals + i * kBlockColumns + j);
      if (block.bias != nullptr) value += cpu::load_partial(block.bias + j, lanes);
      largest = cpu::max(cpu::abs(value), largest);
      cpu::store_partial(row + j, value * block.output_scale, lanes);
    }
  }
  return cpu::horizontal_max(largest);
}

}  // namespace

float multiply_block(const BlockProduct& block) {
  float* a = block.work;
  float* b = a + kBlockRows * kStepK;
  float* sums = b + kBlockColumns * kStepK;
  float* totals = sums + kBlockRows * kBlockColumns;
  for (int64_t first_k = 0; first_k < block.k; first_k += kStepK) {
    const int64_t steps = block.k - first_k < kStepK ? block.k - first_k : kStepK;
    decode(block.a, false, block.first_row, block.rows, first_k, steps, a);
    decode(block.b, true, block.first_column, block.columns, first_k, steps, b);
    multiply_step(block, a, b, steps, sums, !block.is_blocked && first_k > 0);
    if (block.is_blocked) scale_sums(block, first_k / kStepK, sums, totals, first_k > 0);
  }
  if (block.k == 0) {
    for (int64_t i = 0; i < kBlockRows * kBlockColumns; ++i) totals[i] = 0;
  } else if (!block.is_blocked) {
    scale_sums(block, 0, sums, totals, false);
  }
  switch (block.output_type) {
    case OutputType::kFloat32:
      return store_rows<float>(block, totals);
    case OutputType::kBFloat16:
      return store_rows<BFloat16>(block, totals);
    case OutputType::kFloat16:
      return store_rows<Float16>(block, totals);
    case OutputType::kE4M3:
      return store_rows<Float8E4M3>(block, totals);
    case OutputType::kE5M2:
      return store_rows<Float8E5M2>(block, totals);
  }
  return 0;
}

}  // namespace kernel_pytorch::scaled_matmul::KP_ISA_NAMESPACE
