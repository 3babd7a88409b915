#include "kernel_pytorch/ops/activation/activation.h"

#include "kernel_pytorch/ops/activation/operation.h"
#include "kernel_pytorch/registry/choose.h"

namespace kernel_pytorch::activation {

void check(pointwise::ForwardProblem& problem, Device device) {
  pointwise::check_and_merge("activation", "x", problem, device);
}
void check(pointwise::BackwardProblem& problem, Device device) {
  pointwise::check_and_merge("activation", "x", problem, device);
}

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

}  // namespace kernel_pytorch::activation
