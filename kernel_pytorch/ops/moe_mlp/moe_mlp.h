// The experts of a mixture: for each token the weighted sum of the MLPs of the experts that it was routed to.
//
//   hidden[r, :]  = form(x[token_of_row[r], :] gate_up[expert of r] + gate_up_bias)          (grouped_matmul's forms)
//   y[r, :]       = hidden[r, :] down[expert of r] + down_bias
//   output[t, :]  = sum over j of weights[t, j] * y[row_of_token[t, j], :]
//
// Rows are those of moe_routing: sorted by expert, offsets their ends, row -1 for a pair that was dropped. Nothing is
// copied into the order of experts: the first product gathers rows of x, and the sum gathers rows of y, in the order of
// j, so that results are bitwise repeatable. A backward needs x, what the activation was taken of, and the indices.
//
// moe_combine is the last line alone (without weights: ones), moe_activation_backward the middle of the backward:
// of grad_hidden, the gradient of y through down without weights, it makes the gradient of the preactivation, hidden
// with its weights (what down's gradient is made of) and the gradient of weights.
//
// Types: x, weights of experts and outputs fp32, bf16 or fp16 alike, on the CPU also fp64; biases theirs or fp32;
// routing weights and their gradients fp32 (fp64). Sums are fp32. `transposed`: gate_up is [experts, columns, in] and
// down [experts, in, inner], as linear layers store them.
#pragma once

#include "kernel_pytorch/base/export.h"
#include "kernel_pytorch/base/fields.h"
#include "kernel_pytorch/device/context.h"
#include "kernel_pytorch/ops/grouped_matmul/grouped_matmul.h"

namespace kernel_pytorch::moe_mlp {

using grouped_matmul::Form;
using Kind = pointwise::Kind;

struct Combine {
  TensorView y{};             // [rows, columns]
  TensorView row_of_token{};  // [tokens, k]
  TensorView weights{};       // optional [tokens, k]
  TensorView output{};        // [tokens, columns], contiguous
};
inline constexpr auto kCombineFields = fields<Combine>(
    input<&Combine::y>(
        {.shape = "rows columns", .leads = true, .bucketed = "rows", .memory = MemoryLayout::kDenseLast}),
    input<&Combine::row_of_token>({.shape = "tokens k", .dtype = "int32", .memory = MemoryLayout::kContiguous}),
    optional_input<&Combine::weights>(
        {.shape = "tokens k", .dtype = "statistic y", .memory = MemoryLayout::kContiguous, .usual = true}),
    output<&Combine::output>({.shape = "tokens columns", .dtype = "y"}));

struct CombineBackward {
  TensorView grad_output{};   // [tokens, columns]
  TensorView y{};             // [rows, columns]
  TensorView row_of_token{};  // [tokens, k]
  TensorView weights{};       // optional
  TensorView grad_y{};        // optional [rows, columns], contiguous: zeros for rows of no pair
  TensorView grad_weights{};  // optional [tokens, k]
};
inline constexpr auto kCombineBackwardFields = fields<CombineBackward>(
    input<&CombineBackward::grad_output>({.shape = "tokens columns", .dtype = "y", .memory = MemoryLayout::kDenseLast}),
    input<&CombineBackward::y>(
        {.shape = "rows columns", .leads = true, .bucketed = "rows", .memory = MemoryLayout::kDenseLast}),
    input<&CombineBackward::row_of_token>({.shape = "tokens k", .dtype = "int32", .memory = MemoryLayout::kContiguous}),
    optional_input<&CombineBackward::weights>(
        {.shape = "tokens k", .dtype = "statistic y", .memory = MemoryLayout::kContiguous, .usual = true}),
    output<&CombineBackward::grad_y>({.shape = "rows columns", .dtype = "y", .wanted = "y_grad"}),
    output<&CombineBackward::grad_weights>(
        {.shape = "tokens k", .dtype = "statistic y", .when = "weights", .wanted = "weights_grad"}));

struct ActivationBackward {
  TensorView grad_hidden{};    // [rows, inner]
  TensorView preactivation{};  // [rows, inner], gated: [rows, 2 inner]
  TensorView row_of_token{};   // [tokens, k]
  TensorView weights{};        // [tokens, k]
  TensorView grad_output{};    // optional, with down_bias and experts: [tokens, columns]
  TensorView down_bias{};      // [experts, columns]
  TensorView experts{};        // [tokens, k]
  Form form = Form::kPlain;
  Kind activation = Kind::kSilu;
  double limit = 0;
  double slope = 1.702;
  TensorView grad_preactivation{};  // as preactivation; rows of no pair are left as they are, as in the next
  TensorView hidden{};              // [rows, inner]
  TensorView row_weights{};         // optional [rows]
  TensorView grad_weights{};        // [tokens, k]
};
inline constexpr auto kActivationBackwardFields = fields<ActivationBackward>(
    input<&ActivationBackward::grad_hidden>(
        {.shape = "rows inner", .leads = true, .bucketed = "rows", .memory = MemoryLayout::kDenseLast}),
    input<&ActivationBackward::preactivation>(
        {.shape = "rows inner | rows inner*2 | rows inner*2", .shape_by = "form", .dtype = "grad_hidden"}),
    input<&ActivationBackward::row_of_token>({.shape = "tokens k", .dtype = "int32"}),
    input<&ActivationBackward::weights>({.shape = "tokens k", .dtype = "statistic grad_hidden"}),
    optional_input<&ActivationBackward::grad_output>({.shape = "tokens columns", .dtype = "grad_hidden"}),
    optional_input<&ActivationBackward::down_bias>({.shape = "experts columns", .dtype = "grad_hidden"}),
    optional_input<&ActivationBackward::experts>({.shape = "tokens k", .dtype = "int32"}),
    option<&ActivationBackward::form>({.key = KeyPart::kValue, .choices = grouped_matmul::kFormNames}),
    option<&ActivationBackward::activation>({.key = KeyPart::kValue, .choices = pointwise::kKindWords}),
    option<&ActivationBackward::limit>({.key = KeyPart::kPresence}), option<&ActivationBackward::slope>(),
    output<&ActivationBackward::grad_preactivation>(
        {.shape = "rows inner | rows inner*2 | rows inner*2", .shape_by = "form", .dtype = "grad_hidden"}),
    output<&ActivationBackward::hidden>({.shape = "rows inner", .dtype = "grad_hidden"}),
    output<&ActivationBackward::row_weights>({.shape = "rows", .dtype = "statistic grad_hidden"}),
    output<&ActivationBackward::grad_weights>({.shape = "tokens k", .dtype = "statistic grad_hidden"}));

struct Forward {
  TensorView x{};
  TensorView gate_up{}, down{};
  TensorView gate_up_bias{}, down_bias{};  // optional
  TensorView weights{}, experts{}, offsets{}, token_of_row{}, row_of_token{};
  Form form = Form::kPackedGated;
  Kind activation = Kind::kSilu;
  double limit = 0;
  double slope = 1.702;
  bool transposed = false;
  TensorView output{};
  TensorView preactivation{};  // optional: what a backward needs
};
inline constexpr std::string_view kGateUpShape = "experts columns in | experts in columns";
inline constexpr std::string_view kDownShape = "experts in inner | experts inner in";
inline constexpr auto kForwardFields = fields<Forward>(
    input<&Forward::x>({.shape = "tokens in", .leads = true, .bucketed = "tokens", .memory = MemoryLayout::kDenseLast}),
    input<&Forward::gate_up>({.shape = kGateUpShape,
                              .shape_by = "transposed",
                              .dtype = "x",
                              .memory = MemoryLayout::kMatrix,
                              .key = KeyPart::kSizes}),
    input<&Forward::down>({.shape = kDownShape,
                           .shape_by = "transposed",
                           .dtype = "x",
                           .memory = MemoryLayout::kMatrix,
                           .key = KeyPart::kSizes}),
    optional_input<&Forward::gate_up_bias>(
        {.shape = "experts columns", .dtype = "x", .memory = MemoryLayout::kContiguous}),
    optional_input<&Forward::down_bias>({.shape = "experts in", .dtype = "x", .memory = MemoryLayout::kContiguous}),
    input<&Forward::weights>({.shape = "tokens k", .dtype = "statistic x", .memory = MemoryLayout::kContiguous}),
    input<&Forward::experts>(
        {.name = "chosen", .shape = "tokens k", .dtype = "int32", .memory = MemoryLayout::kContiguous}),
    input<&Forward::offsets>({.shape = "experts", .dtype = "int32", .memory = MemoryLayout::kContiguous}),
    input<&Forward::token_of_row>({.shape = "rows", .dtype = "int32", .memory = MemoryLayout::kContiguous}),
    input<&Forward::row_of_token>({.shape = "tokens k", .dtype = "int32", .memory = MemoryLayout::kContiguous}),
    option<&Forward::form>({.key = KeyPart::kValue, .choices = grouped_matmul::kFormNames}),
    option<&Forward::activation>({.key = KeyPart::kValue, .choices = pointwise::kKindWords}),
    option<&Forward::limit>({.key = KeyPart::kPresence}), option<&Forward::slope>(),
    option<&Forward::transposed>({.key = KeyPart::kValue}),
    output<&Forward::output>({.shape = "tokens in", .dtype = "x"}),
    saved<&Forward::preactivation>({.shape = "rows columns", .dtype = "x"}));

// Every gradient is optional.
struct Backward {
  TensorView grad_output{};
  TensorView x{};
  TensorView gate_up{}, down{};
  TensorView gate_up_bias{}, down_bias{};
  TensorView weights{}, experts{}, offsets{}, token_of_row{}, row_of_token{};
  TensorView preactivation{};
  Form form = Form::kPackedGated;
  Kind activation = Kind::kSilu;
  double limit = 0;
  double slope = 1.702;
  bool transposed = false;
  TensorView grad_x{};
  TensorView grad_gate_up{}, grad_down{};
  TensorView grad_gate_up_bias{}, grad_down_bias{};
  TensorView grad_weights{};
};
inline constexpr auto kBackwardFields = fields<Backward>(
    input<&Backward::grad_output>({.shape = "tokens in", .dtype = "x", .memory = MemoryLayout::kDenseLast}),
    input<&Backward::x>(
        {.shape = "tokens in", .leads = true, .bucketed = "tokens", .memory = MemoryLayout::kDenseLast}),
    input<&Backward::gate_up>({.shape = kGateUpShape,
                               .shape_by = "transposed",
                               .dtype = "x",
                               .memory = MemoryLayout::kMatrix,
                               .key = KeyPart::kSizes}),
    input<&Backward::down>({.shape = kDownShape,
                            .shape_by = "transposed",
                            .dtype = "x",
                            .memory = MemoryLayout::kMatrix,
                            .key = KeyPart::kSizes}),
    optional_input<&Backward::gate_up_bias>(
        {.shape = "experts columns", .dtype = "x", .memory = MemoryLayout::kContiguous}),
    optional_input<&Backward::down_bias>({.shape = "experts in", .dtype = "x", .memory = MemoryLayout::kContiguous}),
    input<&Backward::weights>({.shape = "tokens k", .dtype = "statistic x", .memory = MemoryLayout::kContiguous}),
    input<&Backward::experts>(
        {.name = "chosen", .shape = "tokens k", .dtype = "int32", .memory = MemoryLayout::kContiguous}),
    input<&Backward::offsets>({.shape = "experts", .dtype = "int32", .memory = MemoryLayout::kContiguous}),
    input<&Backward::token_of_row>({.shape = "rows", .dtype = "int32", .memory = MemoryLayout::kContiguous}),
    input<&Backward::row_of_token>({.shape = "tokens k", .dtype = "int32", .memory = MemoryLayout::kContiguous}),
    input<&Backward::preactivation>({.shape = "rows columns", .dtype = "x", .memory = MemoryLayout::kDenseLast}),
    option<&Backward::form>({.key = KeyPart::kValue, .choices = grouped_matmul::kFormNames}),
    option<&Backward::activation>({.key = KeyPart::kValue, .choices = pointwise::kKindWords}),
    option<&Backward::limit>({.key = KeyPart::kPresence}), option<&Backward::slope>(),
    option<&Backward::transposed>({.key = KeyPart::kValue}),
    output<&Backward::grad_x>({.shape = "tokens in", .dtype = "x", .wanted = "input_grad"}),
    output<&Backward::grad_gate_up>(
        {.shape = kGateUpShape, .shape_by = "transposed", .dtype = "gate_up", .wanted = "gate_up_grad"}),
    output<&Backward::grad_down>(
        {.shape = kDownShape, .shape_by = "transposed", .dtype = "down", .wanted = "down_grad"}),
    output<&Backward::grad_gate_up_bias>(
        {.shape = "like gate_up_bias", .dtype = "gate_up_bias", .wanted = "gate_up_bias_grad"}),
    output<&Backward::grad_down_bias>({.shape = "like down_bias", .dtype = "down_bias", .wanted = "down_bias_grad"}),
    output<&Backward::grad_weights>({.shape = "tokens k", .dtype = "weights", .wanted = "weights_grad"}));

// Throw Error{kInvalidArgument} naming the argument, both values and the cure.
KP_EXPORT void combine(const Combine& arguments, Context& context);
KP_EXPORT void combine_backward(const CombineBackward& arguments, Context& context);
KP_EXPORT void activation_backward(const ActivationBackward& arguments, Context& context);
KP_EXPORT void forward(const Forward& arguments, Context& context);
KP_EXPORT void backward(const Backward& arguments, Context& context);

}  // namespace kernel_pytorch::moe_mlp
