// The kernels of gated_activation are the pointwise engine's; this is what makes a problem a gated one.
#include "kernel_pytorch/ops/engines/pointwise/operation.h"
#include "kernel_pytorch/ops/gated_activation/gated_activation.h"
#include "kernel_pytorch/ops/gated_activation/operation.h"
#include "kernel_pytorch/registry/op_entry.h"

namespace kernel_pytorch::gated_activation {
namespace {

pointwise::ForwardProblem make_forward(const registry::ProblemRequest& request) {
  return pointwise::make_forward(request, true, "silu");
}
pointwise::BackwardProblem make_backward(const registry::ProblemRequest& request) {
  return pointwise::make_backward(request, true, "silu");
}
std::vector<registry::ProblemRequest> shapes() {
  return pointwise::shapes_of({"silu", "gelu", "gelu_tanh", "relu", "sigmoid"}, true);
}

}  // namespace

constinit const registry::Operation<pointwise::ForwardProblem> kForward =
    pointwise::forward_operation("gated_activation_forward", make_forward, check, shapes);
constinit const registry::Operation<pointwise::BackwardProblem> kBackward =
    pointwise::backward_operation("gated_activation_backward", make_backward, check, shapes);

constexpr auto kDeclarations = registry::join(
    registry::differentiable<Forward, forward>("gated_activation", "gated_activation_forward", kForwardFields),
    registry::plain<Backward, backward>("gated_activation_backward", kBackwardFields),
    registry::differentiable<PackedForward, packed_forward>("gated_activation_packed",
                                                            "gated_activation_packed_forward", kPackedForwardFields),
    registry::plain<PackedBackward, packed_backward>("gated_activation_packed_backward", kPackedBackwardFields));

extern constinit const registry::OpEntry kEntry{.declarations = kDeclarations,
                                                .operations = registry::erased<kForward, kBackward>};

}  // namespace kernel_pytorch::gated_activation
