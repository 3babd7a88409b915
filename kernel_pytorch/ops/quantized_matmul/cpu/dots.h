// What crosses from the host side to the kernel by dot products of bf16 pairs (AVX-512 BF16; cpu/isa.h says why): some
// rows of the weight times all rows of x.
#pragma once

#include "kernel_pytorch/base/fixed_width.h"
#include "kernel_pytorch/ops/support/group_format/format_cuda.h"

namespace kernel_pytorch::quantized_matmul {

// Columns of a step of 4-bit codes; of 8-bit codes a step is half as many. x has zeros up to a multiple of it.
inline constexpr int64_t kDotStep = 64;

// Rows of x that are multiplied at once: the least of these that is not below `rows`. x has as many, the last of zeros.
constexpr int64_t dot_rows(int64_t rows) {
  return rows <= 2 ? rows : rows <= 4 ? 4 : rows <= 8 ? 8 : rows <= 12 ? 12 : 16;
}

inline constexpr int64_t kDotSums = 16;  // of a row of the weight, with those of x's rows of zeros

struct DotPart {
  group_format::Format format;
  int64_t group, k;
  int group_shift;    // group is 1 << this
  const uint16_t* x;  // [steps, dot_rows(m), kDotStep] of bf16, as arrange has it
  int64_t m;
  const uint8_t* codes;  // of the first row, as are scales and zeros
  int64_t code_stride;
  const void* scales;       // bytes, or bf16
  const float* byte_scale;  // what each of 256 bytes is as a scale
  const uint8_t* zeros;     // or null
  int64_t groups;           // of a row
  int64_t rows;
  float* sums;  // [rows, kDotSums]
};

namespace isa_v4bf16 {
// A row of x in the order in which codes are decoded: of 4-bit codes the even columns of a step, then the odd ones.
// `stride` is from a step to the next.
void arrange_dots(group_format::Format format, const uint16_t* row, int64_t k, uint16_t* to, int64_t stride);
void multiply_dots(const DotPart& part);
}  // namespace isa_v4bf16

}  // namespace kernel_pytorch::quantized_matmul
