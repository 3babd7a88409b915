// The kernels of activation are the pointwise engine's; this is what makes a problem an activation's.
#include "kernel_pytorch/ops/activation/activation.h"
#include "kernel_pytorch/ops/activation/operation.h"
#include "kernel_pytorch/ops/engines/pointwise/operation.h"
#include "kernel_pytorch/registry/op_entry.h"

namespace kernel_pytorch::activation {
namespace {

pointwise::ForwardProblem make_forward(const registry::ProblemRequest& request) {
  return pointwise::make_forward(request, false, "gelu");
}
pointwise::BackwardProblem make_backward(const registry::ProblemRequest& request) {
  return pointwise::make_backward(request, false, "gelu");
}
std::vector<registry::ProblemRequest> shapes() {
  return pointwise::shapes_of({"gelu", "gelu_tanh", "silu", "relu", "relu_squared", "sigmoid", "tanh", "identity"},
                              false);
}

}  // namespace

constinit const registry::Operation<pointwise::ForwardProblem> kForward =
    pointwise::forward_operation("activation_forward", make_forward, check, shapes);
constinit const registry::Operation<pointwise::BackwardProblem> kBackward =
    pointwise::backward_operation("activation_backward", make_backward, check, shapes);

constexpr auto kDeclarations =
    registry::join(registry::differentiable<Forward, forward>("activation", "activation_forward", kForwardFields),
                   registry::plain<Backward, backward>("activation_backward", kBackwardFields));

extern constinit const registry::OpEntry kEntry{.declarations = kDeclarations,
                                                .operations = registry::erased<kForward, kBackward>};

}  // namespace kernel_pytorch::activation
