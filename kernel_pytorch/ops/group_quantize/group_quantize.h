// A matrix in few bits: codes of 2 to 8 bits and one scale for each group of columns of a row, and back. The formats,
// their codes and the order of codes in memory are those of ops/support/group_format/format_cuda.h.
//
// quantize: scales follow from the group's largest magnitude:
//   nvfp4   amax / (6 * tensor_scale), to nearest even in E4M3, at most 448
//   mxfp4, mxfp8   2^(floor(log2 amax) - 2), 2^(floor(log2 amax) - 8), from 2^-127 on: OCP's rule
//   int2 .. int8   amax / (half of the codes - 1), so / 1, 3, 7, 15, 31 and 127, to nearest even in the scales' type;
//                  with zeros (high - low) / the last code, where low is at most and high at least 0, and zero =
//                  -low / scale to the nearest integer. Below 2^-100: 0
// A code is the nearest one to x, ties to even, larger magnitudes saturate; "nearest" compares with exact boundaries,
// no quotient is rounded first (nvfp4: exact where tensor_scale is a power of two). With a seed it is one of the two
// nearest, the upper one where 16 random bits of base/philox.h for the element's place (row * columns + column), as a
// fraction, are below the distance from the lower one. Values that have a code keep it. A group with a NaN or an
// infinity gets the scale NaN. Every kernel gives the same bits.
//
// dequantize: value = code * scale * tensor_scale in fp32 (nvfp4: two products), then rounded to the output's type.
//
// Shapes: x and output [rows, columns], rows any distance apart; codes [rows, ceil(columns * bits / 8)] bytes;
// scales and zeros [rows, ceil(columns / group)], contiguous. Types: x and output fp32, bf16 or fp16, output also e4m3
// (saturated); scales e4m3 (nvfp4), bytes (mxfp4, mxfp8), else bf16, fp16 or fp32, of which quantize writes x's. Sizes
// of 0 are legal.
#pragma once

#include <string_view>

#include "kernel_pytorch/base/export.h"
#include "kernel_pytorch/base/fields.h"
#include "kernel_pytorch/device/context.h"
#include "kernel_pytorch/ops/support/group_format/format_cuda.h"

namespace kernel_pytorch::group_quantize {

using group_format::Format;
inline constexpr std::string_view kFormatWords = "nvfp4 mxfp4 mxfp8 int4 int8 int2 int3 int5 int6";

enum class OutputType : uint8_t { kFp32, kBf16, kFp16, kE4M3 };

struct Quantize {
  TensorView x{};
  TensorView tensor_scale{};  // nvfp4, optional: fp32, one element, positive and normal; else 1
  TensorView seed{};          // optional: int64[2], the seed and the offset
  Format format = Format::kNvfp4;
  int64_t group = 16;
  int64_t bytes = 0;  // of a row of codes, where a front end makes them
  TensorView codes{};
  TensorView scales{};
  TensorView zeros{};  // optional, integers
};

struct Dequantize {
  TensorView codes{};
  TensorView scales{};
  TensorView zeros{};         // optional, integers: bytes
  TensorView tensor_scale{};  // nvfp4, optional: fp32, one element
  Format format = Format::kNvfp4;
  int64_t group = 16;
  int64_t columns = 0;  // of the output
  OutputType output_type = OutputType::kBf16;
  TensorView output{};
};

constexpr DType scale_type_of(Format format, DType x) {
  if (format == Format::kNvfp4) return DType::kFloat8E4M3;
  return group_format::has_power_scale(format) ? DType::kInt8 : x;
}

inline constexpr auto kQuantizeFields = fields<Quantize>(
    input<&Quantize::x>(
        {.shape = "rows columns", .leads = true, .bucketed = "rows", .memory = MemoryLayout::kDenseLast}),
    optional_input<&Quantize::tensor_scale>({.dtype = "fp32", .content = "positive"}),
    optional_input<&Quantize::seed>(
        {.shape = "2", .dtype = "int64", .memory = MemoryLayout::kContiguous, .content = "seeds"}),
    option<&Quantize::format>({.key = KeyPart::kValue, .choices = kFormatWords}),
    option<&Quantize::group>({.key = KeyPart::kValue}), option<&Quantize::bytes>({.symbolic = true}),
    output<&Quantize::codes>({.shape = "rows bytes", .dtype = "int8"}),
    output<&Quantize::scales>({.shape = "rows ceil(columns/group)", .dtype = "x", .dtype_option = "scales_dtype"}),
    output<&Quantize::zeros>(
        {.shape = "rows ceil(columns/group)", .dtype = "int8", .wanted = "asymmetric", .trial = "zeros"}));

inline constexpr auto kDequantizeFields = fields<Dequantize>(
    input<&Dequantize::codes>({.shape = "rows bytes",
                               .leads = true,
                               .bucketed = "rows",
                               .memory = MemoryLayout::kContiguous,
                               .content = "indices 256"}),
    input<&Dequantize::scales>({.shape = "rows groups", .memory = MemoryLayout::kContiguous, .content = "indices 128"}),
    optional_input<&Dequantize::zeros>(
        {.shape = "rows groups", .memory = MemoryLayout::kContiguous, .content = "indices 16"}),
    optional_input<&Dequantize::tensor_scale>({.dtype = "fp32", .content = "positive"}),
    option<&Dequantize::format>({.key = KeyPart::kValue, .choices = kFormatWords}),
    option<&Dequantize::group>({.key = KeyPart::kValue}), option<&Dequantize::columns>({.symbolic = true}),
    option<&Dequantize::output_type>({.name = "dtype", .choices = "fp32 bf16 fp16 e4m3", .trial = "output_type"}),
    output<&Dequantize::output>({.shape = "rows columns", .dtype = "named dtype"}));

// Throw Error{kInvalidArgument} naming the argument, both values and the cure.
KP_EXPORT void quantize(const Quantize& arguments, Context& context);
KP_EXPORT void dequantize(const Dequantize& arguments, Context& context);

}  // namespace kernel_pytorch::group_quantize
