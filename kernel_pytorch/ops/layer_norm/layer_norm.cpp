#include "kernel_pytorch/ops/layer_norm/layer_norm.h"

#include "kernel_pytorch/ops/engines/row_norm/check.h"
#include "kernel_pytorch/ops/engines/row_norm/operation.h"
#include "kernel_pytorch/registry/choose.h"
#include "kernel_pytorch/registry/op_entry.h"

namespace kernel_pytorch::layer_norm {
namespace {

constexpr auto kNorm = row_norm::Norm::kLayer;

template <class Problem>
void check(Problem& problem, Device device) {
  row_norm::check_and_merge(kNorm, problem, device);
}

constinit const registry::Operation<Forward> kForward =
    row_norm::forward_operation<kNorm, kForwardFields, check<Forward>>("layer_norm_forward");
constinit const registry::Operation<Backward> kBackward =
    row_norm::backward_operation<kNorm, kBackwardFields, check<Backward>>("layer_norm_backward");

}  // namespace

void forward(const Forward& arguments, Context& context) {
  Forward problem = arguments;
  check(problem, context.device());
  registry::run_best(kForward, problem, context);
}

void backward(const Backward& arguments, Context& context) {
  Backward problem = arguments;
  check(problem, context.device());
  registry::run_best(kBackward, problem, context);
}

constexpr auto kDeclarations = registry::join(
    registry::differentiable<Forward, forward>("layer_norm", "layer_norm_forward", kForwardFields,
                                               {.never = "residual"}),
    registry::differentiable<Forward, forward>("add_layer_norm", "add_layer_norm_forward", kForwardFields,
                                               {.always = "residual"}),
    registry::differentiable<Forward, forward>("layer_norm_activation", "layer_norm_activation_forward", kForwardFields,
                                               {.never = "residual", .shown = "activation"}),
    registry::plain<Backward, backward>("layer_norm_backward", kBackwardFields));

extern constinit const registry::OpEntry kEntry{.declarations = kDeclarations,
                                                .operations = registry::erased<kForward, kBackward>};

}  // namespace kernel_pytorch::layer_norm
