#include "kernel_pytorch/ops/mlp/mlp.h"

#include "kernel_pytorch/base/error.h"
#include "kernel_pytorch/ops/mlp/operation.h"
#include "kernel_pytorch/ops/support/layer_check.h"
#include "kernel_pytorch/registry/any_problem.h"
#include "kernel_pytorch/registry/op_entry.h"

namespace kernel_pytorch::mlp {
namespace {

constexpr std::string_view kForwardName = "mlp", kBackwardName = "mlp backward";

int64_t hidden_size(const TensorView& weight_in, bool gated) {
  return gated ? weight_in.sizes[0] / 2 : weight_in.sizes[0];
}

void check_layers(std::string_view op, const TensorView& x, const TensorView& weight_in, const TensorView& weight_out,
                  bool gated) {
  check_layer(op, x, weight_in, gated);
  const int64_t size = hidden_size(weight_in, gated);
  KP_CHECK(weight_out.rank == 2 && weight_out.sizes[1] == size, op, ": weight_out has shape ",
           shape_text(weight_out.shape()), "; its last size must be the hidden size ", size);
}

TensorView scratch_rows(Context& context, DType dtype, int64_t rows, int64_t columns) {
  TensorView view = contiguous_view(nullptr, dtype, {rows, columns}, context.device());
  view.data = context.scratch->allocate(static_cast<size_t>(view.byte_count()));
  return view;
}

linear::Forward first_layer(const Forward& problem, const TensorView& hidden) {
  return {.x = problem.x,
          .weight = problem.weight_in,
          .bias = problem.bias_in,
          .activation = problem.activation,
          .gated = problem.gated,
          .precision = problem.precision,
          .output = hidden,
          .preactivation = problem.preactivation};
}
linear::Forward second_layer(const Forward& problem, const TensorView& hidden) {
  return {.x = hidden,
          .weight = problem.weight_out,
          .bias = problem.bias_out,
          .residual = problem.residual,
          .precision = problem.precision,
          .output = problem.output};
}

// The second layer's parameters.
linear::Backward second_layer(const Backward& problem) {
  return {.grad_output = problem.grad_output,
          .x = problem.hidden,
          .weight = problem.weight_out,
          .bias = problem.bias_out,
          .precision = problem.precision,
          .grad_weight = problem.grad_weight_out,
          .grad_bias = problem.grad_bias_out};
}
bool differentiates_first_layer(const Backward& problem) {
  return problem.grad_x.is_present() || problem.grad_weight_in.is_present() || problem.grad_bias_in.is_present();
}
// `grad` becomes the gradient of the first layer's preactivation.
matmul::Product through_activation(const Backward& problem, const TensorView& grad) {
  using matmul::Form;
  const bool is_activated = linear::has_activation(problem.activation, problem.gated);
  return {.a = problem.grad_output,
          .b = problem.weight_out,
          .form = !is_activated   ? Form::kPlain
                  : problem.gated ? Form::kGatedGradient
                                  : Form::kGradient,
          .activation = linear::kind_of(problem.activation),
          .saved = problem.preactivation,
          .precision = problem.precision,
          .output = grad};
}
// The first layer, its activation already differentiated.
linear::Backward first_layer(const Backward& problem, const TensorView& grad) {
  return {.grad_output = grad,
          .x = problem.x,
          .weight = problem.weight_in,
          .bias = problem.bias_in,
          .precision = problem.precision,
          .grad_x = problem.grad_x,
          .grad_weight = problem.grad_weight_in,
          .grad_bias = problem.grad_bias_in};
}

void append(registry::Parts& parts, registry::Parts more) {
  for (auto& part : more) parts.push_back(std::move(part));
}

}  // namespace

void check(Forward& problem, Device) {
  const TensorView x = problem.x;
  check_layers(kForwardName, x, problem.weight_in, problem.weight_out, problem.gated);
  const int64_t out = problem.weight_out.sizes[0];
  if (problem.residual.is_present()) check_rows(kForwardName, "residual", problem.residual, x, out);
  check_rows(kForwardName, "output", problem.output, x, out);
  if (problem.hidden.is_present()) {
    check_rows(kForwardName, "hidden", problem.hidden, x, hidden_size(problem.weight_in, problem.gated));
  }
  if (!linear::has_activation(problem.activation, problem.gated)) problem.preactivation = {};
  if (problem.preactivation.is_present()) {
    check_rows(kForwardName, "preactivation", problem.preactivation, x, problem.weight_in.sizes[0]);
  }
  merge_rows(kForwardName, "x", problem.x);
  merge_rows(kForwardName, "residual", problem.residual);
  merge_rows(kForwardName, "output", problem.output);
  merge_rows(kForwardName, "hidden", problem.hidden);
  merge_rows(kForwardName, "preactivation", problem.preactivation);
}

void check(Backward& problem, Device) {
  const TensorView x = problem.x;
  check_layers(kBackwardName, x, problem.weight_in, problem.weight_out, problem.gated);
  check_rows(kBackwardName, "grad_output", problem.grad_output, x, problem.weight_out.sizes[0]);
  if (linear::has_activation(problem.activation, problem.gated)) {
    check_rows(kBackwardName, "preactivation", problem.preactivation, x, problem.weight_in.sizes[0]);
  } else {
    problem.preactivation = {};
  }
  check_rows(kBackwardName, "hidden", problem.hidden, x, hidden_size(problem.weight_in, problem.gated));
  if (problem.grad_x.is_present()) check_rows(kBackwardName, "grad_x", problem.grad_x, x, x.size(-1));
  merge_rows(kBackwardName, "grad_output", problem.grad_output);
  merge_rows(kBackwardName, "x", problem.x);
  merge_rows(kBackwardName, "hidden", problem.hidden);
  merge_rows(kBackwardName, "preactivation", problem.preactivation);
  merge_rows(kBackwardName, "grad_x", problem.grad_x);
}

void compose(const Forward& problem, Context& context) {
  const ScratchScope scope(context.scratch);
  TensorView hidden = problem.hidden;
  if (!hidden.is_present()) {
    hidden = scratch_rows(context, problem.x.dtype, problem.x.sizes[0], hidden_size(problem.weight_in, problem.gated));
  }
  linear::forward(first_layer(problem, hidden), context);
  linear::forward(second_layer(problem, hidden), context);
}

void compose(const Backward& problem, Context& context) {
  linear::backward(second_layer(problem), context);
  if (!differentiates_first_layer(problem)) return;
  const ScratchScope scope(context.scratch);
  const TensorView grad = scratch_rows(context, problem.x.dtype, problem.x.sizes[0], problem.weight_in.sizes[0]);
  matmul::multiply(through_activation(problem, grad), context);
  linear::backward(first_layer(problem, grad), context);
}

registry::Parts parts_of(const Forward& problem, const DeviceInfo& device) {
  const TensorView hidden = contiguous_view(
      nullptr, problem.x.dtype, {problem.x.sizes[0], hidden_size(problem.weight_in, problem.gated)}, problem.x.device);
  registry::Parts parts = linear::parts_of(first_layer(problem, hidden), device);
  append(parts, linear::parts_of(second_layer(problem, hidden), device));
  return parts;
}

registry::Parts parts_of(const Backward& problem, const DeviceInfo& device) {
  registry::Parts parts = linear::parts_of(second_layer(problem), device);
  if (!differentiates_first_layer(problem)) return parts;
  const TensorView grad =
      contiguous_view(nullptr, problem.x.dtype, {problem.x.sizes[0], problem.weight_in.sizes[0]}, problem.x.device);
  parts.push_back(matmul::problem_of(through_activation(problem, grad), device));
  append(parts, linear::parts_of(first_layer(problem, grad), device));
  return parts;
}

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
    registry::join(registry::differentiable<Forward, forward>("mlp", "mlp_forward", kForwardFields),
                   registry::plain<Backward, backward>("mlp_backward", kBackwardFields));

extern constinit const registry::OpEntry kEntry{.declarations = kDeclarations,
                                                .operations = registry::erased<kForward, kBackward>};

}  // namespace kernel_pytorch::mlp
