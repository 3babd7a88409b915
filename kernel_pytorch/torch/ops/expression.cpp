// torch.ops.kernel_pytorch.evaluate_expression: a traced score or mask function (python/kernel_pytorch/expression.py)
// on a tensor of scores.
#include "kernel_pytorch/ops/evaluate_expression/evaluate_expression.h"
#include "kernel_pytorch/torch/op.h"

namespace kernel_pytorch::torch_ops {
namespace {

void evaluate(Call& call, const std::string& program, const TensorView& score, const std::vector<TensorView>& captured,
              bool derivative) {
  evaluate_expression::forward({.program = program,
                                .derivative = derivative,
                                .score = score,
                                .captured = captured,
                                .output = call.output(score.shape(), evaluate_expression::result_dtype(program))},
                               call.context());
}

using Ops = OpList<
    Op<"evaluate_expression(str program, Tensor score, Tensor[] captured, bool derivative) -> Tensor", evaluate>>;

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(kernel_pytorch, library) {
  Ops::define(library);
}
STABLE_TORCH_LIBRARY_IMPL(kernel_pytorch, CPU, library) {
  Ops::implement(library);
}

}  // namespace kernel_pytorch::torch_ops
