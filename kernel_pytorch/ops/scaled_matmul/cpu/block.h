// What crosses from the host side of the CPU kernel to the code built per instruction level (cpu/isa.h says why): one
// block of the output.
#pragma once

#include "kernel_pytorch/base/fixed_width.h"
#include "kernel_pytorch/ops/support/cpu_levels.h"

namespace kernel_pytorch::scaled_matmul {

inline constexpr int64_t kStepK = 128;                          // of k at a time, which is a block of the scales
inline constexpr int64_t kBlockRows = 96, kBlockColumns = 128;  // whole register tiles at every level

struct CodeRows {
  const uint8_t* data = nullptr;
  int64_t row_stride = 0;
  bool is_e5m2 = false;
};

// Strides as ScaleLayout has them.
struct ScaleRows {
  const float* data = nullptr;
  int64_t rows_each = 1, row_stride = 0, block_stride = 0;
};

enum class OutputType : uint8_t { kFloat32, kBFloat16, kFloat16, kE4M3, kE5M2 };

struct BlockProduct {
  CodeRows a, b;
  ScaleRows scale_a, scale_b;
  int64_t first_row = 0, rows = 0;        // of a, at most kBlockRows
  int64_t first_column = 0, columns = 0;  // rows of b, at most kBlockColumns
  int64_t k = 0;
  bool is_blocked = false;
  const float* bias = nullptr;  // of the block's columns, or null
  float output_scale = 1;
  void* output = nullptr;  // of the block's first element
  OutputType output_type = OutputType::kFloat32;
  int64_t output_stride = 0;  // elements
  float* work = nullptr;      // kWorkFloats, aligned to 64 bytes
};

// Codes of a and of b as floats, sums of a step and sums in all.
inline constexpr int64_t kWorkFloats = (kBlockRows + kBlockColumns) * kStepK + 2 * kBlockRows * kBlockColumns;

// Writes the block and returns its largest |v| before the cast, NaN passed over.
KP_EACH_CPU_LEVEL(float multiply_block(const BlockProduct& block);)

}  // namespace kernel_pytorch::scaled_matmul
