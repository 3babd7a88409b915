// torch.ops.kernel_pytorch.gated_activation*: from two tensors, and from one whose halves they are. A packed gradient
// is written half by half into one tensor.
#include "kernel_pytorch/ops/gated_activation/gated_activation.h"

#include "kernel_pytorch/base/error.h"
#include "kernel_pytorch/ops/activation/activation.h"
#include "kernel_pytorch/torch/op.h"

namespace kernel_pytorch::torch_ops {
namespace {

gated_activation::Kind kind_of(const std::string& word) {
  return activation::kind_of(word, "gated_activation");
}

void forward(Call& call, const TensorView& gate, const TensorView& up, const ParameterView& gate_bias,
             const ParameterView& up_bias, const TensorView& residual, const ParameterView& seed,
             const std::string& kind, double dropout_p) {
  gated_activation::forward({.kind = kind_of(kind),
                             .gate = gate,
                             .up = up,
                             .gate_bias = gate_bias,
                             .up_bias = up_bias,
                             .residual = residual,
                             .dropout_p = dropout_p,
                             .seed = seed,
                             .output = call.output_like(gate)},
                            call.context());
}

void backward(Call& call, const TensorView& grad_output, const TensorView& gate, const TensorView& up,
              const ParameterView& gate_bias, const ParameterView& up_bias, const ParameterView& seed,
              const std::string& kind, double dropout_p, bool gate_bias_grad, bool up_bias_grad) {
  gated_activation::backward({.kind = kind_of(kind),
                              .grad_output = grad_output,
                              .gate = gate,
                              .up = up,
                              .gate_bias = gate_bias,
                              .up_bias = up_bias,
                              .dropout_p = dropout_p,
                              .seed = seed,
                              .grad_gate = call.output_like(gate),
                              .grad_up = call.output_like(up),
                              .grad_gate_bias = call.output_like_if(gate_bias_grad, gate_bias, gate),
                              .grad_up_bias = call.output_like_if(up_bias_grad, up_bias, gate)},
                             call.context());
}

// The first or second half of the last dimension; absent of absent.
TensorView half(TensorView view, int which) {
  if (!view.is_present() || view.rank == 0) return view;
  const int last = view.rank - 1;
  view.sizes[last] /= 2;
  view.data = static_cast<char*>(view.data) + which * view.sizes[last] * view.strides[last] * size_of(view.dtype);
  return view;
}

void check_packed(const TensorView& x, const TensorView& bias) {
  KP_CHECK(x.rank >= 1 && x.size(-1) % 2 == 0, "gated_activation: x has shape ", shape_text(x.shape()),
           "; its last dimension must be gate and up side by side, an even number");
  KP_CHECK(!bias.is_present() || (bias.rank == 1 && bias.size(0) == x.size(-1)), "gated_activation: bias has shape ",
           shape_text(bias.shape()), ", the last dimension of x is ", x.size(-1), "; it must have that one dimension");
}

void packed_forward(Call& call, const TensorView& x, const ParameterView& bias, const TensorView& residual,
                    const ParameterView& seed, const std::string& kind, double dropout_p) {
  check_packed(x, bias);
  gated_activation::forward({.kind = kind_of(kind),
                             .gate = half(x, 0),
                             .up = half(x, 1),
                             .gate_bias = half(bias, 0),
                             .up_bias = half(bias, 1),
                             .residual = residual,
                             .dropout_p = dropout_p,
                             .seed = seed,
                             .output = call.output_like(half(x, 0))},
                            call.context());
}

void packed_backward(Call& call, const TensorView& grad_output, const TensorView& x, const ParameterView& bias,
                     const ParameterView& seed, const std::string& kind, double dropout_p, bool bias_grad) {
  check_packed(x, bias);
  const TensorView grad_input = call.output_like(x);
  const TensorView grad_bias = call.output_like_if(bias_grad, bias, x);
  gated_activation::backward({.kind = kind_of(kind),
                              .grad_output = grad_output,
                              .gate = half(x, 0),
                              .up = half(x, 1),
                              .gate_bias = half(bias, 0),
                              .up_bias = half(bias, 1),
                              .dropout_p = dropout_p,
                              .seed = seed,
                              .grad_gate = half(grad_input, 0),
                              .grad_up = half(grad_input, 1),
                              .grad_gate_bias = half(grad_bias, 0),
                              .grad_up_bias = half(grad_bias, 1)},
                             call.context());
}

using Ops = OpList<
    Op<"gated_activation(Tensor gate, Tensor up, Tensor? gate_bias, Tensor? up_bias, Tensor? residual, Tensor? seed, "
       "str kind, float dropout_p) -> Tensor",
       forward>,
    Op<"gated_activation_forward(Tensor gate, Tensor up, Tensor? gate_bias, Tensor? up_bias, Tensor? residual, "
       "Tensor? seed, str kind, float dropout_p) -> Tensor",
       forward>,
    Op<"gated_activation_backward(Tensor grad_output, Tensor gate, Tensor up, Tensor? gate_bias, Tensor? up_bias, "
       "Tensor? seed, str kind, float dropout_p, bool gate_bias_grad, bool up_bias_grad) "
       "-> (Tensor grad_gate, Tensor grad_up, Tensor grad_gate_bias, Tensor grad_up_bias)",
       backward>,
    Op<"gated_activation_packed(Tensor x, Tensor? bias, Tensor? residual, Tensor? seed, str kind, float dropout_p) "
       "-> Tensor",
       packed_forward>,
    Op<"gated_activation_packed_forward(Tensor x, Tensor? bias, Tensor? residual, Tensor? seed, str kind, "
       "float dropout_p) -> Tensor",
       packed_forward>,
    Op<"gated_activation_packed_backward(Tensor grad_output, Tensor x, Tensor? bias, Tensor? seed, str kind, "
       "float dropout_p, bool bias_grad) -> (Tensor grad_input, Tensor grad_bias)",
       packed_backward>>;

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
