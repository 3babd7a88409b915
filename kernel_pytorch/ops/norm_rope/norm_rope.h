// RMS norm of each head, then its rotary embedding: what models with QK norm do to queries and to keys.
//
//   normal = x * (weight + weight_offset) / sqrt(mean(x^2) + eps)        over the head's columns
//   output = normal with columns i and i + rotary_dim / 2 turned by the angle of the token, i < rotary_dim / 2
//
// Shapes: x [batch, sequence, heads, head_dim], with heads_first [batch, heads, sequence, head_dim], any strides;
// weight [head_dim]; cos and sin [rows, width] with a row for each place in the sequence, or [batch or 1, sequence,
// width]. The width is rotary_dim, or half of it (each value stands twice). Columns from rotary_dim on are not turned.
//
// Types: fp32, bf16, fp16 everywhere, fp64 on the CPU; weight, cos and sin of x's type or fp32. Arithmetic is fp32
// (fp64 for fp64), rounded once by the fused kernel and twice where it is made of both ops. Empty tensors are legal.
#pragma once

#include "kernel_pytorch/base/export.h"
#include "kernel_pytorch/base/fields.h"
#include "kernel_pytorch/device/context.h"

namespace kernel_pytorch::norm_rope {

struct Forward {
  TensorView x{};
  TensorView weight{};  // optional
  TensorView cos{};
  TensorView sin{};
  double eps = 1e-6;
  double weight_offset = 0;
  int64_t rotary_dim = 0;  // 0: head_dim
  bool heads_first = false;
  TensorView output{};  // x's shape and type, contiguous
};
inline constexpr auto kForwardFields = fields<Forward>(
    input<&Forward::x>({.leads = true}),
    optional_input<&Forward::weight>({.memory = MemoryLayout::kContiguous, .usual = true}), input<&Forward::cos>(),
    input<&Forward::sin>(), option<&Forward::eps>(), option<&Forward::weight_offset>(), option<&Forward::rotary_dim>(),
    option<&Forward::heads_first>(), output<&Forward::output>({.shape = "like x", .dtype = "x"}));

// Statistics are computed again from x: that costs less than reading them.
struct Backward {
  TensorView grad_output{};
  TensorView x{};
  TensorView weight{};
  TensorView cos{};
  TensorView sin{};
  double eps = 1e-6;
  double weight_offset = 0;
  int64_t rotary_dim = 0;
  bool heads_first = false;
  TensorView grad_x{};       // optional; contiguous
  TensorView grad_weight{};  // optional
};
inline constexpr auto kBackwardFields = fields<Backward>(
    input<&Backward::grad_output>(), input<&Backward::x>({.leads = true}),
    optional_input<&Backward::weight>({.memory = MemoryLayout::kContiguous, .usual = true}), input<&Backward::cos>(),
    input<&Backward::sin>(), option<&Backward::eps>(), option<&Backward::weight_offset>(),
    option<&Backward::rotary_dim>(), option<&Backward::heads_first>(),
    output<&Backward::grad_x>({.shape = "like x", .dtype = "x", .wanted = "x_grad"}),
    output<&Backward::grad_weight>({.shape = "like weight", .dtype = "weight", .wanted = "weight_grad"}));

// Throws Error{kInvalidArgument} naming the argument, both values and the cure.
KP_EXPORT void forward(const Forward& arguments, Context& context);
KP_EXPORT void backward(const Backward& arguments, Context& context);

}  // namespace kernel_pytorch::norm_rope
