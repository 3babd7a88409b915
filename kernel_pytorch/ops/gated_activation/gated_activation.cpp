#include "kernel_pytorch/ops/gated_activation/gated_activation.h"

#include "kernel_pytorch/base/error.h"
#include "kernel_pytorch/ops/gated_activation/operation.h"
#include "kernel_pytorch/registry/choose.h"

namespace kernel_pytorch::gated_activation {
namespace {

void check_gate(Kind kind, const TensorView& up) {
  const bool is_known = kind <= Kind::kRelu || kind == Kind::kSigmoid;
  KP_CHECK(is_known, "gated_activation: kind is \"", pointwise::name_of(kind),
           "\"; a gate is gelu, gelu_tanh, silu, relu or sigmoid");
  KP_CHECK(up.is_present(), "gated_activation: up is missing");
}

}  // namespace

void forward(const Forward& arguments, Context& context) {
  check_gate(arguments.kind, arguments.up);
  pointwise::ForwardProblem problem{.kind = arguments.kind,
                                    .dropout = arguments.dropout_p,
                                    .gate = arguments.gate,
                                    .up = arguments.up,
                                    .gate_bias = arguments.gate_bias,
                                    .up_bias = arguments.up_bias,
                                    .residual = arguments.residual,
                                    .seed = arguments.seed,
                                    .output = arguments.output};
  pointwise::check_and_merge("gated_activation", "gate", problem, context);
  registry::run_best(kForward, problem, context);
}

void backward(const Backward& arguments, Context& context) {
  check_gate(arguments.kind, arguments.up);
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
  pointwise::check_and_merge("gated_activation", "gate", problem, context);
  registry::run_best(kBackward, problem, context);
}

}  // namespace kernel_pytorch::gated_activation
