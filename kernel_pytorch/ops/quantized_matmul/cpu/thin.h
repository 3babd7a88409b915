// What crosses from the host side of the CPU kernel for few rows to the code built per instruction level (cpu/isa.h
// says why): some rows of the weight times all rows of x.
#pragma once

#include "kernel_pytorch/base/fixed_width.h"
#include "kernel_pytorch/ops/support/cpu_levels.h"
#include "kernel_pytorch/ops/support/group_format/format_cuda.h"

namespace kernel_pytorch::quantized_matmul {

// Columns of a step at every level are a divisor of this; x has zeros up to a multiple of it.
inline constexpr int64_t kThinStep = 32;

enum class ThinType : uint8_t { kFloat32, kBFloat16, kFloat16 };

struct ThinPart {
  group_format::Format format;
  int64_t group, k;
  const float* x;  // [m, padded k], arranged by arrange_thin
  int64_t m, x_stride;
  const uint8_t* codes;  // of the first row, as are scales and zeros
  int64_t code_stride;
  const void* scales;    // bytes, or of x's type
  ThinType type;         // of x, to which weights of integers are rounded
  const uint8_t* zeros;  // or null
  int64_t groups;        // of a row
  int64_t rows;
  float* sums;  // [m, sums_stride]
  int64_t sums_stride;
};

// A row of x as floats, in the order in which codes are decoded; zeros up to a multiple of kThinStep. By type: fp32,
// bf16, fp16.
struct ThinKernels {
  void (*arrange[3])(group_format::Format format, const void* row, int64_t k, float* to);
  void (*multiply)(const ThinPart& part);
};
KP_EACH_CPU_LEVEL(extern const ThinKernels kThinKernels;)

}  // namespace kernel_pytorch::quantized_matmul
