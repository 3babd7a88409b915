// What crosses from the host side to the kernel by dot products of 8-bit integers (AVX-512 VNNI): some rows of the
// weight times all rows of x, of which there are at most four.
#pragma once

#include "kernel_pytorch/base/fixed_width.h"
#include "kernel_pytorch/ops/support/group_format/format_cuda.h"

namespace kernel_pytorch::quantized_matmul {

// Rows of x that are multiplied at once; x has as many, the last of zeros.
constexpr int64_t integer_rows(int64_t rows) {
  return rows <= 2 ? rows : 4;
}

// Digits of x: with more rows instructions decide and not memory, and what two keep is still 2^-15 of the largest.
constexpr int integer_digits(int64_t rows) {
  return rows <= 2 ? 3 : 2;
}

inline constexpr int64_t kIntegerSums = 4;    // of a row of the weight, with those of x's rows of zeros
inline constexpr int64_t kUnitColumns = 128;  // whose sums are integers until they meet scales

// Some columns of a row of x as integers of 24 bits, relative to their largest, in three digits of base 256, in the
// order in which codes are decoded. Of two digits the lowest is zero.
struct alignas(64) IntegerUnit {
  int8_t digits[2][3][64];  // the lowest first
  float sums[16];           // of the columns that a lane of 32 bits has
  float scale;              // of the integers, a power of two
};

struct IntegerPart {
  group_format::Format format;
  int64_t group, k;
  const IntegerUnit* x;  // [units, integer_rows(m)]
  int64_t m;
  const uint8_t* codes;  // of the first row, as are scales and zeros
  int64_t code_stride;
  const void* scales;  // bytes, bf16 or fp16
  bool has_half_scales;
  const uint8_t* zeros;  // or null
  int64_t groups;        // of a row
  int64_t rows;
  float* sums;  // [rows, kIntegerSums]
};

namespace isa_v4vnni {
// A row of x, bf16 or fp16, of how many.
struct IntegerRow {
  group_format::Format format;
  int64_t group;
  const void* data;
  bool is_half;
  int64_t k, rows;
};
// As units that are integer_rows(rows) apart. False where it has a NaN or an infinity.
bool arrange_integers(const IntegerRow& row, IntegerUnit* to);
void multiply_integers(const IntegerPart& part);
}  // namespace isa_v4vnni

}  // namespace kernel_pytorch::quantized_matmul
