// The kernels are the pointwise engine's; this is what makes a problem one of gated_activation.
#include "kernel_pytorch/ops/gated_activation/gated_activation.h"

#include "kernel_pytorch/base/error.h"
#include "kernel_pytorch/ops/engines/pointwise/operation.h"
#include "kernel_pytorch/registry/choose.h"
#include "kernel_pytorch/registry/op_entry.h"

namespace kernel_pytorch::gated_activation {
namespace {

void check_gate(Kind kind, const TensorView& up) {
  KP_CHECK(pointwise::is_gate(kind), "gated_activation: kind is \"", pointwise::name_of(kind),
           "\"; a gate is gelu, gelu_tanh, silu, relu, sigmoid or identity");
  KP_CHECK(up.is_present(), "gated_activation: up is missing");
}

// The first or second half of the last dimension; absent of absent.
TensorView half(TensorView view, int which) {
  if (!view.is_present() || view.rank == 0) return view;
  const int last = view.rank - 1;
  view.sizes[last] /= 2;
  view.data = static_cast<char*>(view.data) + which * view.sizes[last] * view.strides[last] * size_of(view.dtype);
  return view;
}

void check_packed(const TensorView& x, const TensorView& bias) {
  KP_CHECK(x.rank >= 1 && x.size(-1) % 2 == 0, "gated_activation: x has shape ", shape_text(x.shape()),
           "; its last dimension must be gate and up side by side, an even number");
  KP_CHECK(!bias.is_present() || (bias.rank == 1 && bias.size(0) == x.size(-1)), "gated_activation: bias has shape ",
           shape_text(bias.shape()), ", the last dimension of x is ", x.size(-1), "; it must have that one dimension");
}

template <class Problem>
void check(Problem& problem, Device device) {
  check_gate(problem.kind, problem.up);
  pointwise::check_and_merge("gated_activation", "gate", problem, device);
}

std::vector<registry::ProblemRequest> shapes() {
  return pointwise::shapes_of("silu,gelu,gelu_tanh,relu,sigmoid", true);
}

constinit const registry::Operation<pointwise::ForwardProblem> kForward = pointwise::forward_operation(
    "gated_activation_forward",
    [](const registry::ProblemRequest& request) { return pointwise::make_forward(request, true, "silu"); }, check,
    shapes);
constinit const registry::Operation<pointwise::BackwardProblem> kBackward = pointwise::backward_operation(
    "gated_activation_backward",
    [](const registry::ProblemRequest& request) { return pointwise::make_backward(request, true, "silu"); }, check,
    shapes);

}  // namespace

void forward(const Forward& arguments, Context& context) {
  pointwise::ForwardProblem problem{.kind = arguments.kind,
                                    .dropout = arguments.dropout_p,
                                    .gate = arguments.gate,
                                    .up = arguments.up,
                                    .gate_bias = arguments.gate_bias,
                                    .up_bias = arguments.up_bias,
                                    .residual = arguments.residual,
                                    .seed = arguments.seed,
                                    .output = arguments.output};
  check(problem, context.device());
  registry::run_best(kForward, problem, context);
}

void backward(const Backward& arguments, Context& context) {
  pointwise::BackwardProblem problem{.kind = arguments.kind,
                                     .dropout = arguments.dropout_p,
                                     .grad_output = arguments.grad_output,
                                     .gate = arguments.gate,
                                     .up = arguments.up,
                                     .gate_bias = arguments.gate_bias,
                                     .up_bias = arguments.up_bias,
                                     .seed = arguments.seed,
                                     .grad_gate = arguments.grad_gate,
                                     .grad_up = arguments.grad_up,
                                     .grad_gate_bias = arguments.grad_gate_bias,
                                     .grad_up_bias = arguments.grad_up_bias};
  check(problem, context.device());
  registry::run_best(kBackward, problem, context);
}

void packed_forward(const PackedForward& arguments, Context& context) {
  check_packed(arguments.x, arguments.bias);
  forward({.kind = arguments.kind,
           .gate = half(arguments.x, 0),
           .up = half(arguments.x, 1),
           .gate_bias = half(arguments.bias, 0),
           .up_bias = half(arguments.bias, 1),
           .residual = arguments.residual,
           .dropout_p = arguments.dropout_p,
           .seed = arguments.seed,
           .output = arguments.output},
          context);
}

void packed_backward(const PackedBackward& arguments, Context& context) {
  check_packed(arguments.x, arguments.bias);
  backward({.kind = arguments.kind,
            .grad_output = arguments.grad_output,
            .gate = half(arguments.x, 0),
            .up = half(arguments.x, 1),
            .gate_bias = half(arguments.bias, 0),
            .up_bias = half(arguments.bias, 1),
            .dropout_p = arguments.dropout_p,
            .seed = arguments.seed,
            .grad_gate = half(arguments.grad_input, 0),
            .grad_up = half(arguments.grad_input, 1),
            .grad_gate_bias = half(arguments.grad_bias, 0),
            .grad_up_bias = half(arguments.grad_bias, 1)},
           context);
}

constexpr auto kDeclarations = registry::join(
    registry::differentiable<Forward, forward>("gated_activation", "gated_activation_forward", kForwardFields),
    registry::plain<Backward, backward>("gated_activation_backward", kBackwardFields),
    registry::differentiable<PackedForward, packed_forward>("gated_activation_packed",
                                                            "gated_activation_packed_forward", kPackedForwardFields),
    registry::plain<PackedBackward, packed_backward>("gated_activation_packed_backward", kPackedBackwardFields));

extern constinit const registry::OpEntry kEntry{.declarations = kDeclarations,
                                                .operations = registry::erased<kForward, kBackward>};

}  // namespace kernel_pytorch::gated_activation
