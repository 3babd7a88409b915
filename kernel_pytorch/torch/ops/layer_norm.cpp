// torch.ops.kernel_pytorch.layer_norm*: schemas and functions. Gradients, shape functions and batching rules are
// Python's (python/kernel_pytorch/_ops/layer_norm.py).
#include "kernel_pytorch/ops/layer_norm/layer_norm.h"

#include "kernel_pytorch/torch/op.h"

namespace kernel_pytorch::torch_ops {
namespace {

using OutputType = std::optional<DType>;  // x's where it is not given

void infer(Call& call, const TensorView& x, const ParameterView& weight, const ParameterView& bias, double eps,
           OutputType type) {
  layer_norm::forward({.x = x, .weight = weight, .bias = bias, .eps = eps, .output = call.output_like(x, type)},
                      call.context());
}

void forward(Call& call, const TensorView& x, const ParameterView& weight, const ParameterView& bias, double eps,
             OutputType type) {
  layer_norm::forward({.x = x,
                       .weight = weight,
                       .bias = bias,
                       .eps = eps,
                       .output = call.output_like(x, type),
                       .mean = call.output_row_statistic(x),
                       .rstd = call.output_row_statistic(x)},
                      call.context());
}

void add_infer(Call& call, const TensorView& x, const TensorView& residual, const ParameterView& weight,
               const ParameterView& bias, double eps, OutputType type) {
  layer_norm::forward({.x = x,
                       .residual = residual,
                       .weight = weight,
                       .bias = bias,
                       .eps = eps,
                       .output = call.output_like(x, type),
                       .sum = call.output_like(x)},
                      call.context());
}

void add_forward(Call& call, const TensorView& x, const TensorView& residual, const ParameterView& weight,
                 const ParameterView& bias, double eps, OutputType type) {
  layer_norm::forward({.x = x,
                       .residual = residual,
                       .weight = weight,
                       .bias = bias,
                       .eps = eps,
                       .output = call.output_like(x, type),
                       .sum = call.output_like(x),
                       .mean = call.output_row_statistic(x),
                       .rstd = call.output_row_statistic(x)},
                      call.context());
}

// `bias` is here for the type of its gradient alone.
void backward(Call& call, const TensorView& grad_output, const TensorView& value, const ParameterView& weight,
              const ParameterView& bias, const RowView& mean, const RowView& rstd, const TensorView& grad_sum,
              bool input_grad, bool weight_grad, bool bias_grad) {
  layer_norm::backward({.grad_output = grad_output,
                        .value = value,
                        .weight = weight,
                        .mean = mean,
                        .rstd = rstd,
                        .grad_sum = grad_sum,
                        .grad_input = call.output_like_if(input_grad, value, value),
                        .grad_weight = call.output_like_if(weight_grad, weight, value),
                        .grad_bias = call.output_like_if(bias_grad, bias, value)},
                       call.context());
}

using Ops = OpList<
    Op<"layer_norm(Tensor x, Tensor? weight, Tensor? bias, float eps, "
       "ScalarType? output_dtype=None) -> Tensor",
       infer>,
    Op<"layer_norm_forward(Tensor x, Tensor? weight, Tensor? bias, float eps, ScalarType? output_dtype=None) "
       "-> (Tensor output, Tensor mean, Tensor rstd)",
       forward>,
    Op<"add_layer_norm(Tensor x, Tensor residual, Tensor? weight, Tensor? bias, float eps, ScalarType? "
       "output_dtype=None) "
       "-> (Tensor output, Tensor sum)",
       add_infer>,
    Op<"add_layer_norm_forward(Tensor x, Tensor residual, Tensor? weight, Tensor? bias, float eps, ScalarType? "
       "output_dtype=None) "
       "-> (Tensor output, Tensor sum, Tensor mean, Tensor rstd)",
       add_forward>,
    Op<"layer_norm_backward(Tensor grad_output, Tensor value, Tensor? weight, Tensor? bias, Tensor mean, Tensor rstd, "
       "Tensor? grad_sum, bool input_grad, bool weight_grad, bool bias_grad) "
       "-> (Tensor grad_input, Tensor grad_weight, Tensor grad_bias)",
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
