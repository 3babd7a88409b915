#include "kernel_pytorch/ops/rms_norm/rms_norm.h"

#include "kernel_pytorch/ops/rms_norm/operation.h"
#include "kernel_pytorch/ops/row_norm/row_norm_check.h"
#include "kernel_pytorch/registry/choose.h"

namespace kernel_pytorch::rms_norm {

void forward(const Forward& arguments, Context& context) {
  row_norm::ForwardProblem problem{.norm = row_norm::Norm::kRms,
                                   .eps = arguments.eps,
                                   .weight_offset = arguments.weight_offset,
                                   .x = arguments.x,
                                   .residual = arguments.residual,
                                   .weight = arguments.weight,
                                   .bias = {},
                                   .output = arguments.output,
                                   .sum = arguments.sum,
                                   .mean = {},
                                   .rstd = arguments.rstd};
  row_norm::check_and_merge("rms_norm", problem, context);
  registry::run_best(kForward, problem, context);
}

void backward(const Backward& arguments, Context& context) {
  row_norm::BackwardProblem problem{.norm = row_norm::Norm::kRms,
                                    .weight_offset = arguments.weight_offset,
                                    .grad_output = arguments.grad_output,
                                    .value = arguments.value,
                                    .weight = arguments.weight,
                                    .mean = {},
                                    .rstd = arguments.rstd,
                                    .grad_sum = arguments.grad_sum,
                                    .grad_input = arguments.grad_input,
                                    .grad_weight = arguments.grad_weight,
                                    .grad_bias = {}};
  row_norm::check_and_merge("rms_norm", problem, context);
  registry::run_best(kBackward, problem, context);
}

}  // namespace kernel_pytorch::rms_norm
