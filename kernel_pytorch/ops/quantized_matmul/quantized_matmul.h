// A product with a weight in few bits (formats: ops/support/group_format/format_cuda.h), which is decoded on its way to
// the multipliers: W4A16 and W8A16.
//
//   w[n, k]      = code value * scale of its group, rounded to x's type    (nvfp4: without tensor_scale)
//   v            = tensor_scale * sum over k of x[m, k] * w[n, k] + bias[n]
//   output[m, n] = activation(v)
//
// Sums are fp32. Codes times E4M3 or E8M0 scales are exact in bf16, so that only integers are rounded there. A kernel
// may keep what fp16 has no number for (mxfp4, mxfp8), round w times tensor_scale, where that is no power of two, and
// apply the scale of integers to a group's sum, where nothing is rounded.
//
// The weight is as group_quantize makes it and checkpoints have it: one layout for every number of rows.
// Shapes: x [..., k], output [..., n], codes [n, ceil(k * bits / 8)], scales and zeros [n, ceil(k / group)],
// bias [n]. Types: x and output fp32, bf16 or fp16 alike, and so are the scales of integers; bias theirs or fp32.
// mxfp8's codes may be any, NaN included. Sizes of 0 are legal; k = 0 gives activation(bias).
#pragma once

#include "kernel_pytorch/base/export.h"
#include "kernel_pytorch/base/fields.h"
#include "kernel_pytorch/device/context.h"
#include "kernel_pytorch/ops/engines/pointwise/kind.h"
#include "kernel_pytorch/ops/group_quantize/group_quantize.h"

namespace kernel_pytorch::quantized_matmul {

using group_format::Format;

struct Product {
  TensorView x{};
  TensorView codes{};
  TensorView scales{};
  TensorView zeros{};         // optional, integers
  TensorView tensor_scale{};  // optional, nvfp4: fp32, one element
  TensorView bias{};          // optional
  Format format = Format::kNvfp4;
  int64_t group = 16;
  pointwise::Kind activation = pointwise::Kind::kIdentity;
  TensorView output{};
};

inline constexpr auto kFields = fields<Product>(
    input<&Product::x>({.shape = "... k", .leads = true, .memory = MemoryLayout::kRows}),
    input<&Product::codes>(
        {.shape = "n bytes", .memory = MemoryLayout::kContiguous, .key = KeyPart::kSizes, .content = "indices 256"}),
    input<&Product::scales>({.shape = "n groups", .memory = MemoryLayout::kContiguous, .content = "indices 128"}),
    optional_input<&Product::zeros>(
        {.shape = "n groups", .memory = MemoryLayout::kContiguous, .content = "indices 16"}),
    optional_input<&Product::tensor_scale>({.dtype = "fp32", .content = "positive"}),
    optional_input<&Product::bias>({.shape = "n", .memory = MemoryLayout::kContiguous}),
    option<&Product::format>({.key = KeyPart::kValue, .choices = group_quantize::kFormatWords}),
    option<&Product::group>({.key = KeyPart::kValue}),
    option<&Product::activation>({.key = KeyPart::kValue, .choices = pointwise::kKindWords}),
    output<&Product::output>({.shape = "... n", .dtype = "x"}));

// Throws Error{kInvalidArgument} naming the argument, both values and the cure.
KP_EXPORT void multiply(const Product& arguments, Context& context);

}  // namespace kernel_pytorch::quantized_matmul
