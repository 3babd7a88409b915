// A product of 8-bit integers with their scales (W8A8): int32 sums of int8 products, exact, and what a linear layer
// does behind them.
//
//   v            = scale_x[m] * sum over groups g of scale_weight[n, g] * (sum over k in g of x[m, k] * weight[n, k])
//   output[m, n] = activation(v + bias[n])
//
// x is int8 codes with a scale for each row, or numbers that are rounded on their way, without scale_x: a row's scale
// is amax / 127 in fp32, its codes x / scale to nearest even; below 2^-100 the scale is 0, and with a NaN or an
// infinity in the row NaN. Kernels may sum up to 65,536 columns as int32; such sums are scaled and added in fp32.
//
// group: columns that share a scale of the weight, 32, 64 or 128; 0: all of a row.
// Shapes: x [..., k], scale_x [...], weight [n, k], scale_weight [n, groups], bias [n], output [..., n]. Types: weight
// int8, scales fp32, output fp32, bf16 or fp16, bias the output's or fp32; x int8, fp32, bf16 or fp16. Sizes of 0 are
// legal; k = 0 gives activation(bias).
#pragma once

#include "kernel_pytorch/base/export.h"
#include "kernel_pytorch/base/fields.h"
#include "kernel_pytorch/device/context.h"
#include "kernel_pytorch/ops/engines/pointwise/kind.h"

namespace kernel_pytorch::int8_matmul {

enum class OutputType : uint8_t { kFp32, kBf16, kFp16 };

struct Product {
  TensorView x{};
  TensorView weight{};
  TensorView scale_weight{};
  TensorView scale_x{};  // with codes, and only then
  TensorView bias{};     // optional
  int64_t group = 0;
  pointwise::Kind activation = pointwise::Kind::kIdentity;
  OutputType output_type = OutputType::kBf16;  // where a front end makes the output
  TensorView output{};
};

inline constexpr auto kFields = fields<Product>(
    input<&Product::x>({.shape = "... k", .leads = true, .memory = MemoryLayout::kRows}),
    input<&Product::weight>({.shape = "n k",
                             .dtype = "int8",
                             .memory = MemoryLayout::kContiguous,
                             .key = KeyPart::kSizes,
                             .content = "indices 256"}),
    input<&Product::scale_weight>(
        {.shape = "n groups", .dtype = "fp32", .memory = MemoryLayout::kContiguous, .content = "positive"}),
    optional_input<&Product::scale_x>(
        {.shape = "...", .dtype = "fp32", .memory = MemoryLayout::kContiguous, .content = "positive"}),
    optional_input<&Product::bias>({.shape = "n", .memory = MemoryLayout::kContiguous}),
    option<&Product::group>({.key = KeyPart::kValue}),
    option<&Product::activation>({.key = KeyPart::kValue, .choices = pointwise::kKindWords}),
    option<&Product::output_type>({.name = "dtype", .choices = "fp32 bf16 fp16", .trial = "output_type"}),
    output<&Product::output>({.shape = "... n", .dtype = "named dtype"}));

// Throws Error{kInvalidArgument} naming the argument, both values and the cure.
KP_EXPORT void multiply(const Product& arguments, Context& context);

}  // namespace kernel_pytorch::int8_matmul
