#include "kernel_pytorch/ops/linear/linear.h"

#include <algorithm>

#include "kernel_pytorch/base/error.h"
#include "kernel_pytorch/ops/activation/activation.h"
#include "kernel_pytorch/ops/gated_activation/gated_activation.h"
#include "kernel_pytorch/ops/linear/operation.h"
#include "kernel_pytorch/ops/support/layer_check.h"
#include "kernel_pytorch/registry/op_entry.h"

namespace kernel_pytorch::linear {
namespace {

constexpr std::string_view kForwardName = "linear", kBackwardName = "linear backward";

TensorView transposed(TensorView matrix) {
  std::swap(matrix.sizes[0], matrix.sizes[1]);
  std::swap(matrix.strides[0], matrix.strides[1]);
  return matrix;
}

int64_t output_columns(const TensorView& weight, bool gated) {
  return gated ? weight.sizes[0] / 2 : weight.sizes[0];
}

void check_up(const Forward& problem) {
  const auto wanted = problem.weight.shape();
  KP_CHECK(std::ranges::equal(problem.weight_up.shape(), wanted), kForwardName, ": weight_up has shape ",
           shape_text(problem.weight_up.shape()), "; it must be the weight's, ", shape_text(wanted));
  KP_CHECK(!problem.gated, kForwardName, ": a gated layer's weight has the ups in its rows; leave out weight_up");
  constexpr Activation kGates[] = {Activation::kGelu, Activation::kGeluTanh, Activation::kSilu, Activation::kRelu,
                                   Activation::kSigmoid};
  KP_CHECK(std::ranges::find(kGates, problem.activation) != std::end(kGates), kForwardName,
           ": with weight_up the activation is a gate's: gelu, gelu_tanh, silu, relu or sigmoid");
  KP_CHECK(!problem.preactivation.is_present(), kForwardName,
           ": nothing is kept for a backward with weight_up; use two layers and gated_activation");
}

TensorView scratch_like(const TensorView& view, Context& context) {
  TensorView scratch = contiguous_view(nullptr, view.dtype, view.shape(), view.device);
  scratch.data = context.scratch->allocate(static_cast<size_t>(scratch.byte_count()));
  return scratch;
}

}  // namespace

void check(Forward& problem, Device) {
  const TensorView x = problem.x;
  check_layer(kForwardName, x, problem.weight, problem.gated);
  const int64_t columns = output_columns(problem.weight, problem.gated);
  if (problem.residual.is_present()) check_rows(kForwardName, "residual", problem.residual, x, columns);
  check_rows(kForwardName, "output", problem.output, x, columns);
  if (!has_activation(problem.activation, problem.gated)) problem.preactivation = {};
  if (problem.weight_up.is_present()) check_up(problem);
  if (problem.preactivation.is_present()) {
    check_rows(kForwardName, "preactivation", problem.preactivation, x, problem.weight.sizes[0]);
  }
  merge_rows(kForwardName, "x", problem.x);
  merge_rows(kForwardName, "residual", problem.residual);
  merge_rows(kForwardName, "output", problem.output);
  merge_rows(kForwardName, "preactivation", problem.preactivation);
}

void check(Backward& problem, Device) {
  const TensorView x = problem.x;
  check_layer(kBackwardName, x, problem.weight, problem.gated);
  check_rows(kBackwardName, "grad_output", problem.grad_output, x, output_columns(problem.weight, problem.gated));
  if (has_activation(problem.activation, problem.gated)) {
    check_rows(kBackwardName, "preactivation", problem.preactivation, x, problem.weight.sizes[0]);
  } else {
    problem.preactivation = {};
  }
  if (problem.grad_x.is_present()) check_rows(kBackwardName, "grad_x", problem.grad_x, x, x.size(-1));
  const auto wanted = problem.weight.shape();
  KP_CHECK(!problem.grad_weight.is_present() || std::ranges::equal(problem.grad_weight.shape(), wanted), kBackwardName,
           ": grad_weight has shape ", shape_text(problem.grad_weight.shape()), "; it must be ", shape_text(wanted));
  merge_rows(kBackwardName, "grad_output", problem.grad_output);
  merge_rows(kBackwardName, "x", problem.x);
  merge_rows(kBackwardName, "preactivation", problem.preactivation);
  merge_rows(kBackwardName, "grad_x", problem.grad_x);
}

matmul::Product product_of(const Forward& problem) {
  const bool has_up = problem.weight_up.is_present();
  return {.a = problem.x,
          .b = transposed(problem.weight),
          .up = has_up ? transposed(problem.weight_up) : TensorView{},
          .bias = problem.bias,
          .form = has_up          ? matmul::Form::kGatedTwice
                  : problem.gated ? matmul::Form::kGated
                                  : matmul::Form::kPlain,
          .activation = kind_of(problem.activation),
          .residual = problem.residual,
          .precision = problem.precision,
          .output = problem.output,
          .preactivation = problem.preactivation};
}

void visit_products(const Backward& problem, const TensorView& grad, const ProductVisitor& visit) {
  const TensorView &x = problem.x, &grad_weight = problem.grad_weight, &grad_bias = problem.grad_bias;
  const matmul::Precision precision = problem.precision;
  if (problem.grad_x.is_present())
    visit({.a = grad, .b = problem.weight, .precision = precision, .output = problem.grad_x});
  const bool is_column = grad_weight.is_present() && is_column_major(grad_weight);
  if (grad_bias.is_present() && (is_column || !grad_weight.is_present())) {
    // Sums over the rows of a gradient: a GEMM without columns.
    TensorView nothing = x;
    nothing.sizes[1] = 0;
    const TensorView output = contiguous_view(grad_bias.data, x.dtype, {grad.sizes[1], 0}, x.device);
    visit({.a = transposed(grad), .b = nothing, .output = output, .row_sums = grad_bias});
  }
  if (is_column) {
    visit({.a = transposed(x), .b = grad, .precision = precision, .output = transposed(grad_weight)});
  } else if (grad_weight.is_present()) {
    visit({.a = transposed(grad), .b = x, .precision = precision, .output = grad_weight, .row_sums = grad_bias});
  }
}

bool is_one_product(const Forward& problem, const DeviceInfo& device) {
  if (!problem.weight_up.is_present()) return true;
  return !problem.bias.is_present() && matmul::has_kernel(product_of(problem), device);
}

GateAndUp gate_and_up_of(const Forward& problem, const TensorView& gate, const TensorView& up) {
  const matmul::Precision precision = problem.precision;
  return {
      {.a = problem.x, .b = transposed(problem.weight), .bias = problem.bias, .precision = precision, .output = gate},
      {.a = problem.x, .b = transposed(problem.weight_up), .precision = precision, .output = up}};
}

void compose(const Forward& problem, Context& context) {
  if (is_one_product(problem, *context.info)) return matmul::multiply(product_of(problem), context);
  const ScratchScope scope(context.scratch);
  const TensorView gate = scratch_like(problem.output, context), up = scratch_like(problem.output, context);
  const GateAndUp products = gate_and_up_of(problem, gate, up);
  matmul::multiply(products.gate, context);
  matmul::multiply(products.up, context);
  gated_activation::forward({.kind = kind_of(problem.activation),
                             .gate = gate,
                             .up = up,
                             .residual = problem.residual,
                             .output = problem.output},
                            context);
}

void compose(const Backward& problem, Context& context) {
  const ScratchScope scope(context.scratch);
  TensorView grad = problem.grad_output;
  if (has_activation(problem.activation, problem.gated)) {
    const TensorView& saved = problem.preactivation;
    grad = scratch_like(saved, context);
    if (problem.gated) {
      matmul::pair_gradient({.activation = kind_of(problem.activation),
                             .grad_output = problem.grad_output,
                             .saved = saved,
                             .grad_input = grad},
                            context);
    } else {
      activation::backward(
          {.kind = kind_of(problem.activation), .grad_output = problem.grad_output, .x = saved, .grad_input = grad},
          context);
    }
  }
  visit_products(problem, grad, [&](const matmul::Product& product) { matmul::multiply(product, context); });
}

// What is chosen is chosen GEMM by GEMM, so a call composes without a choice of its own.
void forward(const Forward& arguments, Context& context) {
  Forward problem = arguments;
  check(problem, context.device());
  compose(problem, context);
}

void backward(const Backward& arguments, Context& context) {
  Backward problem = arguments;
  check(problem, context.device());
  compose(problem, context);
}

constexpr auto kDeclarations =
    registry::join(registry::differentiable<Forward, forward>("linear", "linear_forward", kForwardFields),
                   registry::plain<Backward, backward>("linear_backward", kBackwardFields));

extern constinit const registry::OpEntry kEntry{.declarations = kDeclarations,
                                                .operations = registry::erased<kForward, kBackward>};

}  // namespace kernel_pytorch::linear
