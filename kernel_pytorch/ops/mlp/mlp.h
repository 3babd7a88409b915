// Two linear layers, the first with an activation: the MLP of a transformer, plain or gated.
//
//   hidden = linear(x, weight_in, bias_in, activation, gated), output = linear(hidden, weight_out, bias_out) + residual
//
// Forward is two GEMMs, backward four: the activation's gradient is the epilogue of the GEMM before it. Made of linear
// and matmul, with their shapes, types and errors. A gated layer's weight_in has rows (gate, up, gate, up, ...).
#pragma once

#include "kernel_pytorch/base/export.h"
#include "kernel_pytorch/base/fields.h"
#include "kernel_pytorch/device/context.h"
#include "kernel_pytorch/ops/linear/linear.h"

namespace kernel_pytorch::mlp {

using linear::Activation;

struct Forward {
  TensorView x{};           // [..., in]
  TensorView weight_in{};   // [inner, in]
  TensorView bias_in{};     // optional [inner]
  TensorView weight_out{};  // [out, inner], gated: [out, inner / 2]
  TensorView bias_out{};    // optional [out]
  TensorView residual{};    // optional [..., out]
  Activation activation = Activation::kGelu;
  bool gated = false;
  matmul::Precision precision = matmul::Precision::kFull;  // of every GEMM
  TensorView output{};                                     // [..., out]
  TensorView hidden{};         // optional [..., inner], gated: [..., inner / 2]: what a backward needs
  TensorView preactivation{};  // optional [..., inner]; likewise, with an activation
};

inline constexpr auto kForwardFields = fields<Forward>(
    input<&Forward::x>({.shape = "... in", .leads = true, .memory = MemoryLayout::kRows}),
    input<&Forward::weight_in>({.shape = "inner in", .memory = MemoryLayout::kMatrix, .key = KeyPart::kSizes}),
    optional_input<&Forward::bias_in>(
        {.shape = "inner", .memory = MemoryLayout::kContiguous, .usual = true, .trial = "bias"}),
    input<&Forward::weight_out>({.shape = "out hidden", .memory = MemoryLayout::kMatrix, .key = KeyPart::kSizes}),
    optional_input<&Forward::bias_out>(
        {.shape = "out", .memory = MemoryLayout::kContiguous, .usual = true, .trial = "bias"}),
    optional_input<&Forward::residual>({.shape = "... out", .memory = MemoryLayout::kRows}),
    option<&Forward::activation>({.key = KeyPart::kValue, .choices = linear::kActivationNames}),
    option<&Forward::gated>({.key = KeyPart::kValue}),
    option<&Forward::precision>({.key = KeyPart::kValue, .choices = matmul::kPrecisionNames}),
    output<&Forward::output>({.shape = "... out", .dtype = "x"}),
    saved<&Forward::hidden>({.shape = "... inner/2 | ... inner", .shape_by = "gated", .dtype = "x", .trial = "saved"}),
    saved<&Forward::preactivation>(
        {.shape = "0 | ... inner", .shape_by = "activation", .dtype = "x", .trial = "saved"}));

// The residual's gradient is grad_output itself. Every gradient is optional.
struct Backward {
  TensorView grad_output{};
  TensorView x{};
  TensorView weight_in{};
  TensorView bias_in{};
  TensorView weight_out{};
  TensorView bias_out{};
  TensorView hidden{};
  TensorView preactivation{};
  Activation activation = Activation::kGelu;
  bool gated = false;
  matmul::Precision precision = matmul::Precision::kFull;
  TensorView grad_x{};
  TensorView grad_weight_in{};
  TensorView grad_bias_in{};
  TensorView grad_weight_out{};
  TensorView grad_bias_out{};
};

inline constexpr auto kBackwardFields = fields<Backward>(
    input<&Backward::grad_output>({.shape = "... out", .memory = MemoryLayout::kRows}),
    input<&Backward::x>({.shape = "... in", .leads = true, .memory = MemoryLayout::kRows}),
    input<&Backward::weight_in>({.shape = "inner in", .memory = MemoryLayout::kMatrix, .key = KeyPart::kSizes}),
    optional_input<&Backward::bias_in>(
        {.shape = "inner", .memory = MemoryLayout::kContiguous, .usual = true, .trial = "bias"}),
    input<&Backward::weight_out>({.shape = "out hidden", .memory = MemoryLayout::kMatrix, .key = KeyPart::kSizes}),
    optional_input<&Backward::bias_out>(
        {.shape = "out", .memory = MemoryLayout::kContiguous, .usual = true, .trial = "bias"}),
    input<&Backward::hidden>({.shape = "... hidden", .memory = MemoryLayout::kRows}),
    input<&Backward::preactivation>(
        {.shape = "0 | ... inner", .shape_by = "activation", .memory = MemoryLayout::kRows}),
    option<&Backward::activation>({.key = KeyPart::kValue, .choices = linear::kActivationNames}),
    option<&Backward::gated>({.key = KeyPart::kValue}),
    option<&Backward::precision>({.key = KeyPart::kValue, .choices = matmul::kPrecisionNames}),
    output<&Backward::grad_x>({.shape = "... in", .dtype = "x", .wanted = "input_grad"}),
    output<&Backward::grad_weight_in>(
        {.shape = "inner in", .order_of = "weight_in", .dtype = "weight_in", .wanted = "weight_in_grad"}),
    output<&Backward::grad_bias_in>({.shape = "like bias_in", .dtype = "bias_in", .wanted = "bias_in_grad"}),
    output<&Backward::grad_weight_out>(
        {.shape = "out hidden", .order_of = "weight_out", .dtype = "weight_out", .wanted = "weight_out_grad"}),
    output<&Backward::grad_bias_out>({.shape = "like bias_out", .dtype = "bias_out", .wanted = "bias_out_grad"}));

// Throws Error{kInvalidArgument} naming the argument, both values and the cure.
KP_EXPORT void forward(const Forward& arguments, Context& context);
KP_EXPORT void backward(const Backward& arguments, Context& context);

}  // namespace kernel_pytorch::mlp
