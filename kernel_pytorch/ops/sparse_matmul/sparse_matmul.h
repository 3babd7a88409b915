// A product with a weight of which two of each four neighbours along k are kept (ops/sparse_compress has the layout):
// half of the multiplications and 9/16 of the bytes.
//
//   output[m, n] = activation(sum over k of x[m, k] * w[n, k] + bias[n])
//
// Sums are fp32. Shapes: x [..., k], output [..., n], values [n, k / 2], metadata int32 [ceil(k / 64), n, 2], bias [n];
// k is a multiple of 4. Types: x, values and output fp32, bf16 or fp16 alike; bias theirs or fp32. Metadata is as
// compress makes it: two different places, ascending. Sizes of 0 are legal; k = 0 gives activation(bias).
#pragma once

#include "kernel_pytorch/base/export.h"
#include "kernel_pytorch/base/fields.h"
#include "kernel_pytorch/device/context.h"
#include "kernel_pytorch/ops/engines/pointwise/kind.h"

namespace kernel_pytorch::sparse_matmul {

struct Product {
  TensorView x{};
  TensorView values{};
  TensorView metadata{};
  TensorView bias{};  // optional
  pointwise::Kind activation = pointwise::Kind::kIdentity;
  TensorView output{};
};

inline constexpr auto kFields = fields<Product>(
    input<&Product::x>({.shape = "... k", .leads = true, .memory = MemoryLayout::kRows}),
    input<&Product::values>({.shape = "n kept", .memory = MemoryLayout::kContiguous, .key = KeyPart::kSizes}),
    input<&Product::metadata>(
        {.shape = "blocks n 2", .dtype = "int32", .memory = MemoryLayout::kContiguous, .content = "places"}),
    optional_input<&Product::bias>({.shape = "n", .memory = MemoryLayout::kContiguous}),
    option<&Product::activation>({.key = KeyPart::kValue, .choices = pointwise::kKindWords}),
    output<&Product::output>({.shape = "... n", .dtype = "x"}));

// Throws Error{kInvalidArgument} naming the argument, both values and the cure.
KP_EXPORT void multiply(const Product& arguments, Context& context);

}  // namespace kernel_pytorch::sparse_matmul
