// One tensor's function times another: the gated linear units, with what usually stands around them in one pass.
//
//   output = dropout(function(gate + gate_bias) * (up + up_bias)) + residual
//
// silu is SwiGLU, gelu and gelu_tanh are GEGLU, relu is ReGLU, sigmoid is GLU, identity the product. Gate and up are
// two tensors or the halves of one packed [..., 2 n]: they are views either way, and so are the gradients, whose rows
// may have gaps. Arithmetic, types, dropout and edges are activation.h's.
#pragma once

#include "kernel_pytorch/base/export.h"
#include "kernel_pytorch/base/fields.h"
#include "kernel_pytorch/device/context.h"
#include "kernel_pytorch/ops/activation/activation.h"
#include "kernel_pytorch/ops/engines/pointwise/kind.h"

namespace kernel_pytorch::gated_activation {

using Kind = pointwise::Kind;  // kGelu, kGeluTanh, kSilu, kRelu, kSigmoid, kIdentity

struct Forward {
  Kind kind = Kind::kSilu;
  TensorView gate{};
  TensorView up{};         // the gate's shape and type
  TensorView gate_bias{};  // optional [columns]
  TensorView up_bias{};    // optional [columns]
  TensorView residual{};   // optional
  double dropout_p = 0;
  TensorView seed{};    // with dropout: int64[2], the seed and the offset
  TensorView output{};  // the gate's shape and type, contiguous
};
inline constexpr auto kForwardFields = fields<Forward>(
    input<&Forward::gate>({.shape = "... columns", .leads = true}), input<&Forward::up>({.shape = "... columns"}),
    optional_input<&Forward::gate_bias>({.shape = "columns", .memory = MemoryLayout::kContiguous}),
    optional_input<&Forward::up_bias>({.shape = "columns", .memory = MemoryLayout::kContiguous}),
    optional_input<&Forward::residual>({.shape = "... columns"}),
    optional_input<&Forward::seed>({.shape = "2", .dtype = "int64", .memory = MemoryLayout::kContiguous}),
    option<&Forward::kind>({.choices = pointwise::kKindWords}), option<&Forward::dropout_p>(),
    output<&Forward::output>({.shape = "... columns", .dtype = "gate"}));

// The residual's gradient is grad_output itself.
struct Backward {
  Kind kind = Kind::kSilu;
  TensorView grad_output{};
  TensorView gate{};
  TensorView up{};
  TensorView gate_bias{};
  TensorView up_bias{};
  double dropout_p = 0;
  TensorView seed{};
  TensorView grad_gate{};       // the gate's shape and type, columns of stride 1
  TensorView grad_up{};         // likewise
  TensorView grad_gate_bias{};  // optional, the bias' type; bitwise repeatable
  TensorView grad_up_bias{};
};
inline constexpr auto kBackwardFields = fields<Backward>(
    input<&Backward::grad_output>({.shape = "... columns"}),
    input<&Backward::gate>({.shape = "... columns", .leads = true}), input<&Backward::up>({.shape = "... columns"}),
    optional_input<&Backward::gate_bias>({.shape = "columns", .memory = MemoryLayout::kContiguous}),
    optional_input<&Backward::up_bias>({.shape = "columns", .memory = MemoryLayout::kContiguous}),
    optional_input<&Backward::seed>({.shape = "2", .dtype = "int64", .memory = MemoryLayout::kContiguous}),
    option<&Backward::kind>({.choices = pointwise::kKindWords}), option<&Backward::dropout_p>(),
    output<&Backward::grad_gate>({.shape = "... columns", .dtype = "gate"}),
    output<&Backward::grad_up>({.shape = "... columns", .dtype = "up"}),
    output<&Backward::grad_gate_bias>({.shape = "columns", .dtype = "gate_bias", .wanted = "gate_bias_grad"}),
    output<&Backward::grad_up_bias>({.shape = "columns", .dtype = "up_bias", .wanted = "up_bias_grad"}));

// Packed: x [..., 2 n] is gate and up side by side, and so are its bias [2 n] and the gradients of both; residual and
// output are [..., n].
using PackedForward = activation::Forward;
inline constexpr auto kPackedForwardFields = fields<PackedForward>(
    input<&PackedForward::x>({.shape = "... packed", .leads = true}),
    optional_input<&PackedForward::bias>({.shape = "packed", .memory = MemoryLayout::kContiguous}),
    optional_input<&PackedForward::residual>({.shape = "... columns"}),
    optional_input<&PackedForward::seed>({.shape = "2", .dtype = "int64", .memory = MemoryLayout::kContiguous}),
    option<&PackedForward::kind>({.choices = pointwise::kKindWords}), option<&PackedForward::dropout_p>(),
    output<&PackedForward::output>({.shape = "... packed/2", .dtype = "x"}));

using PackedBackward = activation::Backward;
inline constexpr auto kPackedBackwardFields = fields<PackedBackward>(
    input<&PackedBackward::grad_output>({.shape = "... columns"}),
    input<&PackedBackward::x>({.shape = "... packed", .leads = true}),
    optional_input<&PackedBackward::bias>({.shape = "packed", .memory = MemoryLayout::kContiguous}),
    optional_input<&PackedBackward::seed>({.shape = "2", .dtype = "int64", .memory = MemoryLayout::kContiguous}),
    option<&PackedBackward::kind>({.choices = pointwise::kKindWords}), option<&PackedBackward::dropout_p>(),
    output<&PackedBackward::grad_input>({.shape = "... packed", .dtype = "x"}),
    output<&PackedBackward::grad_bias>({.shape = "packed", .dtype = "bias", .wanted = "bias_grad"}));

// Throws Error{kInvalidArgument} naming the argument, both values and the cure.
KP_EXPORT void forward(const Forward& arguments, Context& context);
KP_EXPORT void backward(const Backward& arguments, Context& context);
KP_EXPORT void packed_forward(const PackedForward& arguments, Context& context);
KP_EXPORT void packed_backward(const PackedBackward& arguments, Context& context);

}  // namespace kernel_pytorch::gated_activation
