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
#include "kernel_pytorch/base/tensor_view.h"
#include "kernel_pytorch/device/context.h"

namespace kernel_pytorch::scaled_matmul {

struct Product {
  TensorView a{};             // [m, k]
  TensorView b{};             // [n, k]
  TensorView scale_a{};       // fp32
  TensorView scale_b{};       // fp32
  TensorView bias{};          // optional: [n]
  TensorView output_scale{};  // fp32, one element, the factor that quantises; with an FP8 output, and only then
  bool accurate = true;
  TensorView output{};  // [m, n]
  TensorView amax{};    // optional: fp32, one element, raised to the largest |v|
};

// Throws Error{kInvalidArgument} naming the argument, both values and the cure.
KP_EXPORT void multiply(const Product& arguments, Context& context);

}  // namespace kernel_pytorch::scaled_matmul
