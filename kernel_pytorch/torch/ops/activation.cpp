// torch.ops.kernel_pytorch.activation*: schemas and functions. Gradients, shape functions and batching rules are
// Python's (python/kernel_pytorch/_ops/activation.py).
#include "kernel_pytorch/ops/activation/activation.h"

#include "kernel_pytorch/torch/op.h"

namespace kernel_pytorch::torch_ops {
namespace {

void forward(Call& call, const TensorView& x, const ParameterView& bias, const TensorView& residual,
             const ParameterView& seed, const std::string& kind, double dropout_p) {
  activation::forward({.kind = activation::kind_of(kind),
                       .x = x,
                       .bias = bias,
                       .residual = residual,
                       .dropout_p = dropout_p,
                       .seed = seed,
                       .output = call.output_like(x)},
                      call.context());
}

void backward(Call& call, const TensorView& grad_output, const TensorView& x, const ParameterView& bias,
              const ParameterView& seed, const std::string& kind, double dropout_p, bool bias_grad) {
  activation::backward({.kind = activation::kind_of(kind),
                        .grad_output = grad_output,
                        .x = x,
                        .bias = bias,
                        .dropout_p = dropout_p,
                        .seed = seed,
                        .grad_input = call.output_like(x),
                        .grad_bias = call.output_like_if(bias_grad, bias, x)},
                       call.context());
}

using Ops =
    OpList<Op<"activation(Tensor x, Tensor? bias, Tensor? residual, Tensor? seed, str kind, float dropout_p) -> Tensor",
              forward>,
           Op<"activation_forward(Tensor x, Tensor? bias, Tensor? residual, Tensor? seed, str kind, float dropout_p) "
              "-> Tensor",
              forward>,
           Op<"activation_backward(Tensor grad_output, Tensor x, Tensor? bias, Tensor? seed, str kind, "
              "float dropout_p, bool bias_grad) -> (Tensor grad_input, Tensor grad_bias)",
              backward>>;

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
