// What host and device agree on: the arithmetic of scales and of stochastic rounding, the tiles, and the arguments of
// the kernels.
#pragma once

#include "kernel_pytorch/base/fixed_width.h"
#include "kernel_pytorch/base/philox.h"
#include "kernel_pytorch/ops/quantize/source_cuda.h"

namespace kernel_pytorch::quantize {

inline constexpr int kTile = 128;  // rows and columns of a tile, and of a block of scales
inline constexpr int kThreads = 512;
inline constexpr uint32_t kInfinityBits = 0x7f800000;

KP_SHARED_CODE constexpr uint32_t bits_of(float value) {
  return __builtin_bit_cast(uint32_t, value);
}
KP_SHARED_CODE constexpr float from_bits(uint32_t bits) {
  return __builtin_bit_cast(float, bits);
}

// How a scale follows from an amax.
struct ScaleRule {
  float largest;        // of the format
  float margin_factor;  // 2^margin
  bool power_of_two;
};

KP_SHARED_CODE inline float scale_of(float amax, const ScaleRule& rule) {
  if (amax == 0.0f) return 1.0f;
  float scale = amax / rule.largest * rule.margin_factor;
  scale = scale < 0x1p-126f ? 0x1p-126f : scale > 0x1p126f ? 0x1p126f : scale;
  if (rule.power_of_two) {
    const uint32_t bits = bits_of(scale);
    scale = from_bits((bits + 0x7fffff) & 0x7f800000);
  }
  return scale;
}

// A format by its fields.
struct Format {
  int mantissa_bits, bias;
  uint32_t largest_code;
};
inline constexpr Format kE4M3{3, 7, 0x7e}, kE5M2{2, 15, 0x7b};

// The code of a value, with 16 random bits.
KP_SHARED_CODE inline uint32_t stochastic_code(float value, uint32_t random, int mantissa_bits, int bias,
                                               uint32_t largest_code) {
  const uint32_t bits = bits_of(value), magnitude = bits & 0x7fffffff, sign = bits >> 24 & 0x80;
  if (magnitude > kInfinityBits) return sign | 0x7f;
  const int shift = 23 - mantissa_bits;
  uint32_t code;
  if (magnitude < static_cast<uint32_t>(128 - bias) << 23) {
    // Below the least normal number the grid is even: counted in its steps. Both factors are powers of two.
    const float steps = from_bits(magnitude) * from_bits(static_cast<uint32_t>(126 + bias + mantissa_bits) << 23);
    code = static_cast<uint32_t>(steps + static_cast<float>(random) * 0x1p-16f);
  } else {
    code = ((magnitude + (random << (shift - 16))) >> shift) - (static_cast<uint32_t>(127 - bias) << mantissa_bits);
  }
  return sign | (code < largest_code ? code : largest_code);
}

enum class Mode : int32_t { kTensor, kRow, k1x128, k128x128, k1x128Square };

struct Scales {
  float* data;
  int64_t row_stride, block_stride;
};

// What is quantised, and the operands of its producer; with a producer rows are dense.
struct Input {
  const void* x;
  int64_t row_stride, column_stride;  // of x, in elements
  int64_t rows, columns;              // of what is rounded
  int64_t half;                       // columns of x: all, or half of those
  const void* up;                     // gates
  const void* grad_output;            // a gate's gradient
  int64_t up_stride, grad_stride;     // rows apart, in elements
  const float* rstd;                  // norms
  const void* weight;                 // norms, or null
  float weight_offset;
  bool weight_is_float;  // else of x's type
  void* value;           // where it is written as well, contiguous, or null
};

struct Arguments {
  Input input;
  int32_t row_tiles, column_tiles;
  int32_t group;      // row tiles that blocks walk down before the next tile to the right
  bool from_the_end;  // the last tiles first: what the kernel before read last is still in L2
  bool in_pairs;      // tiles of the two halves side by side: they read the same
  Mode mode;
  ScaleRule rule;
  uint8_t* codes;       // or null
  uint8_t* transposed;  // or null
  int64_t codes_stride, transposed_stride;
  const float* given_scale;  // or null
  // Bits of magnitudes: of parts of all, or of the rows and then the columns; null where none is needed.
  const uint32_t* measured;
  int32_t measured_parts;
  Scales scales, transposed_scales;  // data null: not written
  const int64_t* seed;               // or null
  uint32_t* amax;                    // or null
  float* found_nonfinite;            // or null
};

// Arguments of the kernel that measures the scale before the cast.
struct MeasureArguments {
  Input input;
  int32_t row_tiles, column_tiles;
  bool by_row_and_column;
  uint32_t* measured;  // zeros: one, or one for each row and then for each column; dense: of each block, any
};

// Scales of rows and no transposed codes, in one visit: threads of a row, and vectors of 16 bytes that each has at
// most.
inline constexpr int kRowThreads = 256;
inline constexpr int kMostRowVectors = 8;
struct RowArguments {
  const void* x;
  int64_t row_stride, codes_stride;
  int32_t columns;
  ScaleRule rule;
  uint8_t* codes;
  Scales scales;
};

// The kernel that measures rows before a norm.
inline constexpr int kNormThreads = 256;
struct NormArguments {
  const void* x;
  const void* residual;  // or null
  void* sum;             // with residual, contiguous
  int64_t row_stride, residual_stride, columns;
  float eps;
  float* rstd;
};

}  // namespace kernel_pytorch::quantize
