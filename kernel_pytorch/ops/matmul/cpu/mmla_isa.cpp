// kp-isa: neonbf16
// Products of bf16 by Arm's matrix instruction BFMMLA, which adds a 2 x 4 times a 4 x 2 matrix to 2 x 2 sums: 8 x 12
// sums are 24 of the 32 registers. A tile of A is [k / 4][4 pairs of rows][2][4], a panel of B [k / 4][6 pairs of
// columns][2][4]. Takes bf16 tensors, and fp32 ones whose caller asked for bf16. The instruction takes numbers below
// the normal ones for 0. Machines with SVE of 256 bits run it too: there the same work would be half as many
// instructions on half as many units.
#include "kernel_pytorch/ops/matmul/cpu/epilogue_isa.h"

namespace kernel_pytorch::matmul::KP_ISA_NAMESPACE {
namespace {

using cpu::VecU16;

constexpr int64_t kRows = 8, kColumns = 12;
constexpr int64_t kRowPairs = kRows / 2, kColumnPairs = kColumns / 2;
constexpr int64_t kDepth = 4;  // steps of k in an instruction
constexpr int64_t kWords = kDepth;
constexpr int64_t kChainQuads = 192;  // of k, summed by themselves

// `count` neighbours as bf16 (all four where it is larger), zeros behind them.
KP_PRIMITIVE VecU16 load_words(const BFloat16* from, int64_t count) {
  if (count >= kWords) return cpu::load_storage<VecU16>(from);
  return count <= 0 ? VecU16{} : cpu::load_storage_partial<VecU16, sizeof(BFloat16)>(from, count);
}
KP_PRIMITIVE VecU16 load_words(const float* from, int64_t count) {
  if (count >= kWords) return cpu::float_to_bfloat16(cpu::load(from));
  return count <= 0 ? VecU16{} : cpu::float_to_bfloat16(cpu::load_partial(from, count));
}

// Four steps of `kLines` lines (rows of A, columns of B), whose steps are neighbours in memory.
template <int64_t kLines, class T>
KP_PRIMITIVE void pack_along(const T* from, int64_t stride, int64_t lines, int64_t steps, uint16_t* to) {
#pragma GCC unroll 12
  for (int64_t i = 0; i < kLines; ++i) {
    cpu::store_storage(to + i * kWords, i < lines ? load_words(from + i * stride, steps) : VecU16{});
  }
}

// The same where the lines are neighbours: squares of 4 x 4 are transposed.
template <int64_t kLines, class T>
KP_PRIMITIVE void pack_across(const T* from, int64_t stride, int64_t lines, int64_t steps, uint16_t* to) {
#pragma GCC unroll 3
  for (int64_t i = 0; i < kLines; i += kWords) {
    VecU16 square[kDepth];
    for (int64_t j = 0; j < kDepth; ++j) {
      square[j] = j < steps ? load_words(from + j * stride + i, lines - i) : VecU16{};
    }
    const uint16x4x2_t upper = vtrn_u16(square[0], square[1]), lower = vtrn_u16(square[2], square[3]);
    for (int odd = 0; odd < 2; ++odd) {
      const uint32x2x2_t both = vtrn_u32(vreinterpret_u32_u16(upper.val[odd]), vreinterpret_u32_u16(lower.val[odd]));
      cpu::store_storage(to + (i + odd) * kWords, both.val[0]);
      cpu::store_storage(to + (i + 2 + odd) * kWords, both.val[1]);
    }
  }
}

template <int64_t kLines, class T>
void pack_of(const PackTask& task, int64_t line_stride, int64_t step_stride) {
  const T* from = static_cast<const T*>(task.from.data) + task.first * line_stride + task.step * step_stride;
  for (int64_t line = 0; line < task.count; line += kLines) {
    auto* to = reinterpret_cast<uint16_t*>(task.to + line / kLines * task.tile_bytes);
    for (int64_t step = 0; step < task.steps; step += kDepth, to += kLines * kDepth) {
      const T* here = from + line * line_stride + step * step_stride;
      const int64_t lines = task.count - line, steps = task.steps - step;
      step_stride == 1 ? pack_along<kLines>(here, line_stride, lines, steps, to)
                       : pack_across<kLines>(here, step_stride, lines, steps, to);
    }
  }
}
void pack_mmla_a(const PackTask& task) {
  const int64_t line = task.from.row_stride, step = task.from.column_stride;
  task.from.dtype == DType::kFloat32 ? pack_of<kRows, float>(task, line, step)
                                     : pack_of<kRows, BFloat16>(task, line, step);
}
void pack_mmla_b(const PackTask& task) {
  const int64_t line = task.from.column_stride, step = task.from.row_stride;
  task.from.dtype == DType::kFloat32 ? pack_of<kColumns, float>(task, line, step)
                                     : pack_of<kColumns, BFloat16>(task, line, step);
}

// sums [8][12] (+)= a tile times a panel, for at most kChainQuads.
[[gnu::noinline]] void multiply_quads(const uint16_t* a, const uint16_t* b, int64_t quads, float* sums, bool add) {
  const auto words_at = [](const uint16_t* from) { return vreinterpretq_bf16_u16(vld1q_u16(from)); };
  float32x4_t totals[kRowPairs][kColumnPairs] = {};
  for (int64_t quad = 0; quad < quads; ++quad) {
    bfloat16x8_t rows[kRowPairs];
#pragma GCC unroll 4
    for (int i = 0; i < kRowPairs; ++i) rows[i] = words_at(a + i * 2 * kWords);
#pragma GCC unroll 6
    for (int j = 0; j < kColumnPairs; ++j) {
      const bfloat16x8_t columns = words_at(b + j * 2 * kWords);
#pragma GCC unroll 4
      for (int i = 0; i < kRowPairs; ++i) totals[i][j] = vbfmmlaq_f32(totals[i][j], rows[i], columns);
#pragma GCC unroll 4
      for (int i = 0; i < kRowPairs; ++i) cpu::load_after(totals[i][j], b);
    }
    a += kRows * kDepth;
    b += kColumns * kDepth;
  }
#pragma GCC unroll 4
  for (int i = 0; i < kRowPairs; ++i) {
#pragma GCC unroll 3
    for (int j = 0; j < kColumnPairs; j += 2) {
      const float64x2_t left = vreinterpretq_f64_f32(totals[i][j]), right = vreinterpretq_f64_f32(totals[i][j + 1]);
      const Vec of_rows[2] = {vreinterpretq_f32_f64(vzip1q_f64(left, right)),
                              vreinterpretq_f32_f64(vzip2q_f64(left, right))};
#pragma GCC unroll 2
      for (int row = 0; row < 2; ++row) {
        float* to = sums + (2 * i + row) * kColumns + 2 * j;
        cpu::store(to, add ? of_rows[row] + cpu::load(to) : of_rows[row]);
      }
    }
  }
}

void multiply_at(const BlockTask& task, int64_t row, int64_t column, float* sums) {
  const int64_t columns = smaller(kColumns, task.columns - column), quads = (task.steps + kDepth - 1) / kDepth;
  const auto* a = reinterpret_cast<const uint16_t*>(task.a + row / kRows * task.a_tile_bytes);
  const auto* b = reinterpret_cast<const uint16_t*>(task.b + column / kColumns * task.b_panel_bytes);
  for (int64_t quad = 0; quad < quads || quad == 0; quad += kChainQuads) {
    multiply_quads(a + quad * kRows * kDepth, b + quad * kColumns * kDepth, smaller(kChainQuads, quads - quad), sums,
                   task.add || quad > 0);
  }
  if (task.is_last) {
    finish_tile(task.epilogue, sums, kColumns, row, smaller(kRows, task.rows - row), column, columns);
  }
}

// Panel by panel, so that a panel of B stays in the caches; the last block tile by tile, for long rows of the output.
void multiply_mmla(const BlockTask& task) {
  const int64_t panels = (task.columns + kColumns - 1) / kColumns, tiles = (task.rows + kRows - 1) / kRows;
  for (int64_t i = 0; i < panels * tiles; ++i) {
    const int64_t tile = task.is_last ? i / panels : i % tiles, panel = task.is_last ? i % panels : i / tiles;
    multiply_at(task, tile * kRows, panel * kColumns, task.sums + (tile * panels + panel) * task.sums_tile_floats);
  }
  if (task.is_last && task.epilogue.streams) cpu::stream_fence();
}

}  // namespace

extern const ProductKernels kDotProductKernels;
constinit const ProductKernels kDotProductKernels{.tile_rows = kRows,
                                                  .panel_columns = kColumns,
                                                  .depth = kDepth,
                                                  .element_bytes = 2,
                                                  .block_steps = 1024,
                                                  .group_panels = 8,
                                                  .pack_a = pack_mmla_a,
                                                  .pack_b = pack_mmla_b,
                                                  .multiply = multiply_mmla};

}  // namespace kernel_pytorch::matmul::KP_ISA_NAMESPACE
