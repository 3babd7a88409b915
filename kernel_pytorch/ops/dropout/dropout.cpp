#include "kernel_pytorch/ops/dropout/dropout.h"

#include "kernel_pytorch/ops/dropout/operation.h"
#include "kernel_pytorch/registry/choose.h"

namespace kernel_pytorch::dropout {

void check(pointwise::ForwardProblem& problem, Device device) {
  pointwise::check_and_merge("dropout", "x", problem, device);
}

void forward(const Forward& arguments, Context& context) {
  pointwise::ForwardProblem problem;
  problem.dropout = arguments.p;
  problem.gate = arguments.x;
  problem.seed = arguments.seed;
  problem.output = arguments.output;
  check(problem, context.device());
  registry::run_best(kForward, problem, context);
}

}  // namespace kernel_pytorch::dropout
