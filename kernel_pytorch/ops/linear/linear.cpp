#include "kernel_pytorch/ops/linear/linear.h"

#include <algorithm>

#include "kernel_pytorch/base/error.h"
#include "kernel_pytorch/ops/activation/activation.h"
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

}  // namespace

void check(Forward& problem, Device) {
  const TensorView x = problem.x;
  check_layer(kForwardName, x, problem.weight, problem.gated);
  const int64_t columns = output_columns(problem.weight, problem.gated);
  if (problem.residual.is_present()) check_rows(kForwardName, "residual", problem.residual, x, columns);
  check_rows(kForwardName, "output", problem.output, x, columns);
  if (!has_activation(problem.activation, problem.gated)) problem.preactivation = {};
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
  return {.a = problem.x,
          .b = transposed(problem.weight),
          .bias = problem.bias,
          .form = problem.gated ? matmul::Form::kGated : matmul::Form::kPlain,
          .activation = kind_of(problem.activation),
          .residual = problem.residual,
          .output = problem.output,
          .preactivation = problem.preactivation};
}

void visit_products(const Backward& problem, const TensorView& grad, const ProductVisitor& visit) {
  const TensorView &x = problem.x, &grad_weight = problem.grad_weight, &grad_bias = problem.grad_bias;
  if (problem.grad_x.is_present()) visit({.a = grad, .b = problem.weight, .output = problem.grad_x});
  const bool is_column = grad_weight.is_present() && is_column_major(grad_weight);
  if (grad_bias.is_present() && (is_column || !grad_weight.is_present())) {
    // Sums over the rows of a gradient: a GEMM without columns.
    TensorView nothing = x;
    nothing.sizes[1] = 0;
    const TensorView output = contiguous_view(grad_bias.data, x.dtype, {grad.sizes[1], 0}, x.device);
    visit({.a = transposed(grad), .b = nothing, .output = output, .row_sums = grad_bias});
  }
  if (is_column) {
    visit({.a = transposed(x), .b = grad, .output = transposed(grad_weight)});
  } else if (grad_weight.is_present()) {
    visit({.a = transposed(grad), .b = x, .output = grad_weight, .row_sums = grad_bias});
  }
}

void compose(const Forward& problem, Context& context) {
  matmul::multiply(product_of(problem), context);
}

void compose(const Backward& problem, Context& context) {
  const ScratchScope scope(context.scratch);
  TensorView grad = problem.grad_output;
  if (has_activation(problem.activation, problem.gated)) {
    const TensorView& saved = problem.preactivation;
    grad = contiguous_view(nullptr, saved.dtype, saved.shape(), saved.device);
    grad.data = context.scratch->allocate(static_cast<size_t>(grad.byte_count()));
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
