// torch.ops.kernel_pytorch.dropout*: its backward is the same function of the gradient.
#include "kernel_pytorch/ops/dropout/dropout.h"

#include "kernel_pytorch/torch/op.h"

namespace kernel_pytorch::torch_ops {
namespace {

void forward(Call& call, const TensorView& x, const ParameterView& seed, double p) {
  dropout::forward({.x = x, .p = p, .seed = seed, .output = call.output_like(x)}, call.context());
}

using Ops = OpList<Op<"dropout(Tensor x, Tensor seed, float p) -> Tensor", forward>,
                   Op<"dropout_forward(Tensor x, Tensor seed, float p) -> Tensor", forward>,
                   Op<"dropout_backward(Tensor grad_output, Tensor seed, float p) -> Tensor", forward>>;

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(kernel_pytorch, library) {
  Ops::define(library);
}
STABLE_TORCH_LIBRARY_IMPL(kernel_pytorch, CPU, library) {
  Ops::implement(library);
}
STABLE_TORCH_LIBRARY_IMPL(kernel_pytorch, CUDA, library) {
  Ops::implement(library);
}

}  // namespace kernel_pytorch::torch_ops
