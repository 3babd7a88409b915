// What crosses from the host side to thin_dots_isa.cpp.
#pragma once

#include "kernel_pytorch/ops/matmul/cpu/tiles.h"

namespace kernel_pytorch::matmul {

// Few rows of bf16 times columns of bf16, both of neighbours along k and as they lie: sums [count, columns] of fp32.
struct ThinDotsTask {
  Operand few{};  // [count, steps]
  int64_t count = 0;
  Operand many{};  // [steps, columns]
  int64_t steps = 0, columns = 0;
  float* sums = nullptr;
  int64_t sums_stride = 0;
};

// Rows of bf16, at most kPanelRows, in words of two neighbours along k: [steps / 2][padded], zeros behind the last row.
inline constexpr int64_t kPanelRows = 64;
struct PanelTask {
  Operand from{};  // [count, steps]
  int64_t count = 0, steps = 0;
  int64_t padded = 0;  // count up to a multiple of 16
  uint32_t* to = nullptr;
};
// Such rows times columns of bf16 of neighbours along k, which are read as they lie: sums [columns, padded] of fp32.
struct PanelDotsTask {
  const uint32_t* few = nullptr;
  int64_t padded = 0;
  Operand many{};  // [steps, columns]; at least six columns
  int64_t steps = 0, columns = 0;
  float* sums = nullptr;  // whole tiles of six columns
};

#if defined(__x86_64__)
namespace isa_v4bf16 {
void multiply_thin_dots(const ThinDotsTask& task);
void pack_panel(const PanelTask& task);
void multiply_panel(const PanelDotsTask& task);
// [columns, padded] to [padded, to_stride], for whole vectors of both.
void turn_panel(const float* from, int64_t padded, int64_t columns, float* to, int64_t to_stride);
}  // namespace isa_v4bf16
#endif

}  // namespace kernel_pytorch::matmul
