// A product of FP8 matrices with their scales: what a linear layer in FP8 does forward, and twice backward.
//
//   v            = sum over k of (scale_a a[m, k]) (scale_b b[n, k]) + bias[n]
//   amax         = max(amax, |v|)                                        (optional; NaN leaves it alone)
//   output[m, n] = v, or where output is FP8 the saturated v * output_scale
//
// a [m, k] and b [n, k] are e4m3 or e5m2 (mixed is legal), both dense in k: Hopper multiplies FP8 along k only, so b is
// what nn.Linear stores. Scales are fp32 dequantising factors (value = scale * code), with any strides:
//   per tensor [] or [1];  per row [m] or [m, 1] ([n] for b);  1x128 blocks [m, ceil(k/128)];
//   128x128 blocks [ceil(m/128), ceil(k/128)]. Their shapes say which; where two fit, they mean the same.
// Output fp32, bf16, fp16, e4m3 or e5m2, rows any distance apart; bias fp32, or bf16 or fp16.
//
// accurate: partial sums leave the tensor core's accumulator (about 14 bits on Hopper) every 128 of k and are summed in
// fp32. Block scales are always summed so, and so are CPUs: there the codes are decoded to fp32, in which every product
// of two codes is exact, so that a recipe rounds as on the hardware but for the order and width of its sums.
// Sizes of 0 are legal; k = 0 gives the bias.
#pragma once

#include "kernel_pytorch/base/export.h"
#include "kernel_pytorch/base/fields.h"
#include "kernel_pytorch/device/context.h"

namespace kernel_pytorch::scaled_matmul {

// What front ends that allocate the output choose its type by; an output that is given has its own.
enum class OutputFormat : uint8_t { kFp32, kBf16, kFp16, kE4M3, kE5M2 };

struct Product {
  TensorView a{};             // [m, k]
  TensorView b{};             // [n, k]
  TensorView scale_a{};       // fp32
  TensorView scale_b{};       // fp32
  TensorView bias{};          // optional: [n]
  TensorView output_scale{};  // fp32, one element, the factor that quantises; with an FP8 output, and only then
  OutputFormat output_format = OutputFormat::kBf16;
  bool accurate = true;
  TensorView output{};  // [m, n]
  TensorView amax{};    // optional: fp32, one element, raised to the largest |v|
};

inline constexpr auto kFields = fields<Product>(
    input<&Product::a>({.shape = "m k", .leads = true, .bucketed = "m", .memory = MemoryLayout::kDenseLast}),
    input<&Product::b>({.shape = "n k", .memory = MemoryLayout::kDenseLast, .key = KeyPart::kSizes}),
    input<&Product::scale_a>({.content = "positive"}), input<&Product::scale_b>({.content = "positive"}),
    optional_input<&Product::bias>({.shape = "n", .memory = MemoryLayout::kContiguous}),
    optional_input<&Product::output_scale>({.content = "positive"}),
    option<&Product::output_format>({.name = "dtype", .choices = "fp32 bf16 fp16 e4m3 e5m2", .trial = "output_format"}),
    option<&Product::accurate>({.key = KeyPart::kValue}),
    output<&Product::output>({.shape = "m n", .dtype = "named dtype"}),
    optional_updated<&Product::amax>({.shape = "1", .dtype = "fp32", .hidden = true, .content = "positive"}));

// Throws Error{kInvalidArgument} naming the argument, both values and the cure.
KP_EXPORT void multiply(const Product& arguments, Context& context);

}  // namespace kernel_pytorch::scaled_matmul
