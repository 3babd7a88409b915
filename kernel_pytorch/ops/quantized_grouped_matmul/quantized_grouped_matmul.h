// Products of groups of rows, each group with a weight of its own in few bits: the experts of a mixture. Groups are
// those of grouped_matmul, weights those of quantized_matmul, in every format that it takes.
//
//   w[g, n, k]   = code value * scale, rounded to x's type      (nvfp4: without tensor_scale)
//   v[r, n]      = tensor_scale * sum over k of x[r, k] * w[group of r, n, k] + bias[group of r, n]
//   output[r, n] = activation(v[r, n]), zeros for rows in no group
//
// Group g is the rows [offsets[g - 1], offsets[g]), from 0 on; groups may be empty. With gather row r is row gather[r]
// of x. The groups' weights lie behind each other as one matrix of groups * n rows, as group_quantize makes it.
//
// Shapes: x [rows, k], or with gather [any, k]; codes [groups * n, ceil(k * bits / 8)], scales and zeros [groups * n,
// ceil(k / group)], offsets [groups], bias [groups, n], output [rows, n]. Types: as quantized_matmul has them, offsets
// and gather int32. Sizes of 0 are legal. Up to 1024 groups. A kernel may round w times tensor_scale, or apply the
// scale of integers to a group's sum.
#pragma once

#include "kernel_pytorch/base/export.h"
#include "kernel_pytorch/base/fields.h"
#include "kernel_pytorch/device/context.h"
#include "kernel_pytorch/ops/engines/pointwise/kind.h"
#include "kernel_pytorch/ops/group_quantize/group_quantize.h"

namespace kernel_pytorch::quantized_grouped_matmul {

using group_format::Format;

struct Product {
  TensorView x{};
  TensorView codes{};
  TensorView scales{};
  TensorView offsets{};
  TensorView zeros{};         // optional, integers
  TensorView tensor_scale{};  // optional, nvfp4: fp32, one element
  TensorView gather{};        // optional [rows]
  TensorView bias{};          // optional [groups, n]
  Format format = Format::kNvfp4;
  int64_t group = 16;  // columns that share a scale
  pointwise::Kind activation = pointwise::Kind::kIdentity;
  int64_t rows = 0;  // of the output, where a front end makes it
  TensorView output{};
};

inline constexpr auto kFields = fields<Product>(
    input<&Product::x>({.shape = "source k", .leads = true, .bucketed = "source", .memory = MemoryLayout::kDenseLast}),
    input<&Product::codes>({.shape = "lines bytes",
                            .memory = MemoryLayout::kContiguous,
                            .key = KeyPart::kSizes,
                            .content = "indices 256"}),
    input<&Product::scales>({.shape = "lines scales", .memory = MemoryLayout::kContiguous, .content = "indices 128"}),
    input<&Product::offsets>(
        {.shape = "groups", .dtype = "int32", .memory = MemoryLayout::kContiguous, .key = KeyPart::kSizes}),
    optional_input<&Product::zeros>(
        {.shape = "lines scales", .memory = MemoryLayout::kContiguous, .content = "indices 16"}),
    optional_input<&Product::tensor_scale>({.dtype = "fp32", .content = "positive"}),
    optional_input<&Product::gather>({.shape = "rows", .dtype = "int32", .memory = MemoryLayout::kContiguous}),
    optional_input<&Product::bias>({.shape = "groups lines/groups", .memory = MemoryLayout::kContiguous}),
    option<&Product::format>({.key = KeyPart::kValue, .choices = group_quantize::kFormatWords}),
    option<&Product::group>({.key = KeyPart::kValue}),
    option<&Product::activation>({.key = KeyPart::kValue, .choices = pointwise::kKindWords}),
    option<&Product::rows>({.symbolic = true}), output<&Product::output>({.shape = "rows lines/groups", .dtype = "x"}));

// Throws Error{kInvalidArgument} naming the argument, both values and the cure. Offsets are read on the CPU, and with
// KERNEL_PYTORCH_CHECK=1 on a GPU, where they are clamped to the rows otherwise.
KP_EXPORT void multiply(const Product& arguments, Context& context);

}  // namespace kernel_pytorch::quantized_grouped_matmul
