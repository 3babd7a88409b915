#include "kernel_pytorch/ops/rms_norm/rms_norm.h"

#include "kernel_pytorch/ops/engines/row_norm/check.h"
#include "kernel_pytorch/ops/engines/row_norm/operation.h"
#include "kernel_pytorch/ops/rms_norm/operation.h"
#include "kernel_pytorch/registry/choose.h"
#include "kernel_pytorch/registry/op_entry.h"

namespace kernel_pytorch::rms_norm {
namespace {

constexpr auto kNorm = row_norm::Norm::kRms;

template <class Problem>
void check(Problem& problem, Device device) {
  row_norm::check_and_merge(kNorm, problem, device);
}

}  // namespace

constinit const registry::Operation<Forward> kForward =
    row_norm::forward_operation<kNorm, kForwardFields, check<Forward>>("rms_norm_forward");
constinit const registry::Operation<Backward> kBackward =
    row_norm::backward_operation<kNorm, kBackwardFields, check<Backward>>("rms_norm_backward");

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
    registry::differentiable<Forward, forward>("rms_norm", "rms_norm_forward", kForwardFields, {.never = "residual"}),
    registry::differentiable<Forward, forward>("add_rms_norm", "add_rms_norm_forward", kForwardFields,
                                               {.always = "residual"}),
    registry::differentiable<Forward, forward>("rms_norm_activation", "rms_norm_activation_forward", kForwardFields,
                                               {.never = "residual", .shown = "activation"}),
    registry::plain<Backward, backward>("rms_norm_backward", kBackwardFields));

extern constinit const registry::OpEntry kEntry{.declarations = kDeclarations,
                                                .operations = registry::erased<kForward, kBackward>};

}  // namespace kernel_pytorch::rms_norm
