// One tensor's function times another: the gated linear units, with what usually stands around them in one pass.
//
//   output = dropout(function(gate + gate_bias) * (up + up_bias)) + residual
//
// silu is SwiGLU, gelu and gelu_tanh are GEGLU, relu is ReGLU, sigmoid is GLU. Gate and up are two tensors or the
// halves of one packed [..., 2 n]: they are views either way, and so are the gradients, whose rows may have gaps.
// Arithmetic, types, dropout and edges are activation.h's.
#pragma once

#include "kernel_pytorch/base/export.h"
#include "kernel_pytorch/base/tensor_view.h"
#include "kernel_pytorch/device/context.h"
#include "kernel_pytorch/ops/pointwise/pointwise_kind_cuda.h"

namespace kernel_pytorch::gated_activation {

using Kind = pointwise::Kind;  // kGelu, kGeluTanh, kSilu, kRelu, kSigmoid

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

// Throws Error{kInvalidArgument} naming the argument, both values and the cure.
KP_EXPORT void forward(const Forward& arguments, Context& context);
KP_EXPORT void backward(const Backward& arguments, Context& context);

}  // namespace kernel_pytorch::gated_activation
