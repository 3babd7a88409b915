// A function of each element, with what usually stands around it in one pass over memory.
//
//   output = dropout(function(x + bias)) + residual
//
// Functions: gelu (erf), gelu_tanh, silu, relu, relu_squared, sigmoid, tanh, identity. Arithmetic is fp32 (fp64 for
// fp64), rounded once. Dropout zeroes an element with probability p and divides the others by 1 - p, p counting in
// steps of 1/65536; its bits are base/philox.h's for the element's place in the contiguous output, so they are the same
// on every device. A dropped element is 0, whatever it was.
//
// Shapes: x [..., columns] with any strides and any leading shape, bias [columns], residual as x. Types: fp32, bf16,
// fp16 and fp64; the bias has x's type or fp32. NaN and infinity propagate as in torch. Empty x is
// legal. All tensors live on the context's device.
#pragma once

#include <string_view>

#include "kernel_pytorch/base/export.h"
#include "kernel_pytorch/base/fields.h"
#include "kernel_pytorch/device/context.h"
#include "kernel_pytorch/ops/engines/pointwise/kind.h"

namespace kernel_pytorch::activation {

using Kind = pointwise::Kind;

struct Forward {
  Kind kind = Kind::kGelu;
  TensorView x{};
  TensorView bias{};      // optional
  TensorView residual{};  // optional
  double dropout_p = 0;
  TensorView seed{};    // with dropout: int64[2], the seed and the offset
  TensorView output{};  // x's shape and type, contiguous
};
inline constexpr auto kForwardFields = fields<Forward>(
    input<&Forward::x>({.shape = "... columns", .leads = true}),
    optional_input<&Forward::bias>({.shape = "columns", .memory = MemoryLayout::kContiguous}),
    optional_input<&Forward::residual>({.shape = "... columns"}),
    optional_input<&Forward::seed>({.shape = "2", .dtype = "int64", .memory = MemoryLayout::kContiguous}),
    option<&Forward::kind>({.choices = pointwise::kKindWords}), option<&Forward::dropout_p>(),
    output<&Forward::output>({.shape = "... columns", .dtype = "x"}));

// The residual's gradient is grad_output itself.
struct Backward {
  Kind kind = Kind::kGelu;
  TensorView grad_output{};
  TensorView x{};
  TensorView bias{};
  double dropout_p = 0;
  TensorView seed{};
  TensorView grad_input{};  // x's shape and type, columns of stride 1
  TensorView grad_bias{};   // optional, the bias' type; bitwise repeatable
};
inline constexpr auto kBackwardFields = fields<Backward>(
    input<&Backward::grad_output>({.shape = "... columns"}),
    input<&Backward::x>({.shape = "... columns", .leads = true}),
    optional_input<&Backward::bias>({.shape = "columns", .memory = MemoryLayout::kContiguous}),
    optional_input<&Backward::seed>({.shape = "2", .dtype = "int64", .memory = MemoryLayout::kContiguous}),
    option<&Backward::kind>({.choices = pointwise::kKindWords}), option<&Backward::dropout_p>(),
    output<&Backward::grad_input>({.shape = "... columns", .dtype = "x"}),
    output<&Backward::grad_bias>({.shape = "columns", .dtype = "bias", .wanted = "bias_grad"}));

// Throws Error{kInvalidArgument} naming the argument, both values and the cure.
KP_EXPORT void forward(const Forward& arguments, Context& context);
KP_EXPORT void backward(const Backward& arguments, Context& context);

}  // namespace kernel_pytorch::activation
