// The kernels are the pointwise engine's; this is what makes a problem one of activation.
#include "kernel_pytorch/ops/activation/activation.h"

#include "kernel_pytorch/ops/engines/pointwise/operation.h"
#include "kernel_pytorch/registry/choose.h"
#include "kernel_pytorch/registry/op_entry.h"

namespace kernel_pytorch::activation {
namespace {

template <class Problem>
void check(Problem& problem, Device device) {
  pointwise::check_and_merge("activation", "x", problem, device);
}

std::vector<registry::ProblemRequest> shapes() {
  return pointwise::shapes_of("gelu,gelu_tanh,silu,relu,relu_squared,sigmoid,tanh,identity", false);
}

constinit const registry::Operation<pointwise::ForwardProblem> kForward = pointwise::forward_operation(
    "activation_forward",
    [](const registry::ProblemRequest& request) { return pointwise::make_forward(request, false, "gelu"); }, check,
    shapes);
constinit const registry::Operation<pointwise::BackwardProblem> kBackward = pointwise::backward_operation(
    "activation_backward",
    [](const registry::ProblemRequest& request) { return pointwise::make_backward(request, false, "gelu"); }, check,
    shapes);

}  // namespace

void forward(const Forward& arguments, Context& context) {
  pointwise::ForwardProblem problem{.kind = arguments.kind,
                                    .dropout = arguments.dropout_p,
                                    .gate = arguments.x,
                                    .up = {},
                                    .gate_bias = arguments.bias,
                                    .up_bias = {},
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
                                     .gate = arguments.x,
                                     .up = {},
                                     .gate_bias = arguments.bias,
                                     .up_bias = {},
                                     .seed = arguments.seed,
                                     .grad_gate = arguments.grad_input,
                                     .grad_up = {},
                                     .grad_gate_bias = arguments.grad_bias,
                                     .grad_up_bias = {}};
  check(problem, context.device());
  registry::run_best(kBackward, problem, context);
}

constexpr auto kDeclarations =
    registry::join(registry::differentiable<Forward, forward>("activation", "activation_forward", kForwardFields),
                   registry::plain<Backward, backward>("activation_backward", kBackwardFields));

extern constinit const registry::OpEntry kEntry{.declarations = kDeclarations,
                                                .operations = registry::erased<kForward, kBackward>};

}  // namespace kernel_pytorch::activation
