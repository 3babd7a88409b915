// torch.ops.kernel_pytorch.softmax*: schemas and functions. Gradients, shape functions and batching rules are Python's
// (python/kernel_pytorch/_ops/softmax.py). `log` makes it log_softmax.
#include "kernel_pytorch/ops/softmax/softmax.h"

#include "kernel_pytorch/torch/op.h"

namespace kernel_pytorch::torch_ops {
namespace {

void forward(Call& call, const TensorView& x, const TensorView& mask, double scale, bool causal, bool log) {
  softmax::forward({.x = x, .mask = mask, .scale = scale, .causal = causal, .log = log, .output = call.output_like(x)},
                   call.context());
}

void in_place(Call& call, const TensorView& x, const TensorView& mask, double scale, bool causal, bool log) {
  softmax::forward({.x = x, .mask = mask, .scale = scale, .causal = causal, .log = log, .output = x}, call.context());
}

void backward(Call& call, const TensorView& grad_output, const TensorView& output, double scale, bool log,
              bool masked) {
  softmax::backward({.grad_output = grad_output,
                     .output = output,
                     .scale = scale,
                     .log = log,
                     .masked = masked,
                     .grad_input = call.output_like(output)},
                    call.context());
}

using Ops = OpList<
    Op<"softmax(Tensor x, Tensor? mask, float scale, bool causal, bool log) -> Tensor", forward>,
    Op<"softmax_forward(Tensor x, Tensor? mask, float scale, bool causal, bool log) -> Tensor", forward>,
    Op<"softmax_(Tensor(a!) x, Tensor? mask, float scale, bool causal, bool log) -> ()", in_place>,
    Op<"softmax_backward(Tensor grad_output, Tensor output, float scale, bool log, bool masked) -> Tensor", backward>>;

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
