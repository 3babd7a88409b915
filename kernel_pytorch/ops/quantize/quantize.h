// To FP8 in one visit: codes, their scales, the transposed codes (FP8 products run along k only, so backward needs
// them) and the largest magnitude.
//
//   scale = amax == 0 ? 1 : amax / largest of the format * 2^margin, rounded up to a power of two where asked for;
//           clamped to [2^-126, 2^126], so that it and its inverse are always finite and normal
//   code  = x * (1 / scale), both rounded to fp32, then to nearest even in the format, saturated; with a seed by
//           stochastic rounding: 16 bits of base/philox.h for the element's place (row * columns + column) are added
//           below the last place that is kept, and the rest is cut off. Values on the grid stay. NaN stays NaN,
//           infinity saturates. Every kernel gives the same codes and scales, bit for bit.
//
// Granularity of the scales (value = scale * code), of codes [rows, columns] and transposed [columns, rows]:
//   tensor   scales [1], for both; or `scale` given, which is delayed scaling: one read of x
//   row      scales [rows]; transposed_scales [columns]
//   1x128    scales [rows, ceil(columns / 128)]; transposed_scales [columns, ceil(rows / 128)]
//   128x128  scales [ceil(rows / 128), ceil(columns / 128)], for both
//   1x128 with square_transpose: transposed codes in 128x128 blocks, transposed_scales [ceil(columns / 128),
//            ceil(rows / 128)]: the second operand of a product along rows, which multiplies faster than 1x128
// amax counts finite values alone. found_nonfinite becomes 1 where x has an infinity or a NaN, and is else left alone:
// the step is to be skipped, as by torch's GradScaler. amax is raised, never lowered.
//
// What is rounded may be made of x on the way (`source`), so that it never lies in memory in 16 bits:
//   norm          value = x * rstd * (weight + weight_offset), rstd = 1 / sqrt(mean of x^2 over the row + eps):
//   rms_norm;
//                 with a residual, x + residual rounded to x's type, which is written as `sum`, takes x's place
//   gate          value = function(x) * up
//   gate_gradient value = [grad_output * function'(x) * up, grad_output * function(x)], twice as many columns as x: the
//                 gradient of a gate and its factor that lie side by side
// The value is rounded to x's type and then takes x's place above: codes are those of the op followed by quantize. It
// can be written as well.
//
// x [rows, columns] fp32, bf16 or fp16, any strides; codes and transposed e4m3 or e5m2, rows any distance apart; scales
// any strides. Empty x is legal.
#pragma once

#include "kernel_pytorch/base/export.h"
#include "kernel_pytorch/base/fields.h"
#include "kernel_pytorch/device/context.h"
#include "kernel_pytorch/ops/engines/pointwise/kind.h"
#include "kernel_pytorch/ops/quantize/source_cuda.h"

namespace kernel_pytorch::quantize {

enum class Granularity : uint8_t { kTensor, kRow, k1x128, k128x128 };

struct Quantize {
  TensorView x{};
  TensorView scale{};  // optional, granularity tensor: fp32, one element, positive and normal
  TensorView seed{};   // optional: int64[2], the seed and the offset
  Granularity granularity = Granularity::kTensor;
  int64_t margin = 0;  // -32 to 32
  bool power_of_two = false;
  bool square_transpose = false;   // granularity 1x128
  TensorView codes{};              // optional, as is
  TensorView transposed{};         // but one of them
  TensorView scales{};             // unless scale is given
  TensorView transposed_scales{};  // with transposed, by row and 1x128
  TensorView amax{};               // optional: fp32, one element
  TensorView found_nonfinite{};    // optional: fp32, one element
  Source source = Source::kGiven;
  pointwise::Kind kind = pointwise::Kind::kSilu;  // gates: kGelu, kGeluTanh, kSilu, kRelu, kSigmoid
  double eps = 1e-6;
  double weight_offset = 0;  // added to a weight
  TensorView up{};           // gates: x's shape and type, any strides
  TensorView grad_output{};  // gate_gradient: likewise
  TensorView residual{};     // norm, optional: likewise
  TensorView weight{};       // norm, optional [columns]: x's type or fp32, stride 1
  TensorView value{};        // optional output [rows, columns of the value], x's type, contiguous
  TensorView sum{};          // norm, with residual: output, x's shape and type, contiguous
  TensorView rstd{};         // norm, optional output [rows] fp32, contiguous
};

// Outputs are the caller's, who knows how far apart rows of codes should lie.
inline constexpr auto kFields = fields<Quantize>(
    input<&Quantize::x>({.shape = "rows columns", .leads = true, .bucketed = "rows"}),
    optional_input<&Quantize::up>({.shape = "rows columns"}),
    optional_input<&Quantize::grad_output>({.shape = "rows columns"}),
    optional_input<&Quantize::residual>({.shape = "rows columns"}),
    optional_input<&Quantize::weight>({.shape = "columns", .memory = MemoryLayout::kContiguous, .usual = true}),
    optional_input<&Quantize::scale>({.content = "positive"}),
    optional_input<&Quantize::seed>(
        {.shape = "2", .dtype = "int64", .memory = MemoryLayout::kContiguous, .content = "seeds"}),
    output<&Quantize::value>({.shape = "rows columns | rows columns | rows columns | rows columns*2",
                              .shape_by = "source",
                              .dtype = "x",
                              .optional = true,
                              .trial = "value"}),
    output<&Quantize::sum>({.shape = "rows columns", .dtype = "x", .when = "residual", .optional = true}),
    output<&Quantize::rstd>({.shape = "rows", .dtype = "fp32", .optional = true}),
    output<&Quantize::codes>({.shape = "rows columns | rows columns | rows columns | rows columns*2",
                              .shape_by = "source",
                              .dtype = "x",
                              .wanted = "codes",
                              .optional = true}),
    output<&Quantize::transposed>({.shape = "columns rows | columns rows | columns rows | columns*2 rows",
                                   .shape_by = "source",
                                   .dtype = "x",
                                   .wanted = "transposed",
                                   .optional = true}),
    output<&Quantize::scales>({.optional = true}), output<&Quantize::transposed_scales>({.optional = true}),
    optional_updated<&Quantize::amax>({.shape = "1", .dtype = "fp32", .content = "positive"}),
    optional_updated<&Quantize::found_nonfinite>(
        {.shape = "1", .dtype = "fp32", .trial = "amax", .content = "positive"}),
    option<&Quantize::source>({.key = KeyPart::kValue, .choices = "none norm gate gate_gradient", .trial = "producer"}),
    option<&Quantize::kind>({.key = KeyPart::kValue, .choices = pointwise::kKindWords}), option<&Quantize::eps>(),
    option<&Quantize::weight_offset>(),
    option<&Quantize::granularity>({.key = KeyPart::kValue, .choices = "tensor row 1x128 128x128"}),
    option<&Quantize::margin>(), option<&Quantize::power_of_two>(),
    option<&Quantize::square_transpose>({.key = KeyPart::kValue, .trial = "square"}));

// Throws Error{kInvalidArgument} naming the argument, both values and the cure.
KP_EXPORT void quantize(const Quantize& arguments, Context& context);

}  // namespace kernel_pytorch::quantize
