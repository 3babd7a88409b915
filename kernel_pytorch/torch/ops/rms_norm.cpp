// torch.ops.kernel_pytorch.rms_norm*: schemas and functions. Gradients, shape functions and batching rules are Python's
// (python/kernel_pytorch/_ops/rms_norm.py).
#include "kernel_pytorch/ops/rms_norm/rms_norm.h"

#include "kernel_pytorch/torch/op.h"

namespace kernel_pytorch::torch_ops {
namespace {

using OutputType = std::optional<DType>;  // x's where it is not given

void infer(Call& call, const TensorView& x, const ParameterView& weight, double eps, double weight_offset,
           OutputType type) {
  rms_norm::forward(
      {.x = x, .weight = weight, .eps = eps, .weight_offset = weight_offset, .output = call.output_like(x, type)},
      call.context());
}

void forward(Call& call, const TensorView& x, const ParameterView& weight, double eps, double weight_offset,
             OutputType type) {
  rms_norm::forward({.x = x,
                     .weight = weight,
                     .eps = eps,
                     .weight_offset = weight_offset,
                     .output = call.output_like(x, type),
                     .rstd = call.output_row_statistic(x)},
                    call.context());
}

void add_infer(Call& call, const TensorView& x, const TensorView& residual, const ParameterView& weight, double eps,
               double weight_offset, OutputType type) {
  rms_norm::forward({.x = x,
                     .residual = residual,
                     .weight = weight,
                     .eps = eps,
                     .weight_offset = weight_offset,
                     .output = call.output_like(x, type),
                     .sum = call.output_like(x)},
                    call.context());
}

void add_forward(Call& call, const TensorView& x, const TensorView& residual, const ParameterView& weight, double eps,
                 double weight_offset, OutputType type) {
  rms_norm::forward({.x = x,
                     .residual = residual,
                     .weight = weight,
                     .eps = eps,
                     .weight_offset = weight_offset,
                     .output = call.output_like(x, type),
                     .sum = call.output_like(x),
                     .rstd = call.output_row_statistic(x)},
                    call.context());
}

void backward(Call& call, const TensorView& grad_output, const TensorView& value, const ParameterView& weight,
              const RowView& rstd, const TensorView& grad_sum, double weight_offset, bool input_grad,
              bool weight_grad) {
  rms_norm::backward({.grad_output = grad_output,
                      .value = value,
                      .weight = weight,
                      .rstd = rstd,
                      .weight_offset = weight_offset,
                      .grad_sum = grad_sum,
                      .grad_input = call.output_like_if(input_grad, value, value),
                      .grad_weight = call.output_like_if(weight_grad, weight, value)},
                     call.context());
}

using Ops = OpList<
    Op<"rms_norm(Tensor x, Tensor? weight, float eps, float weight_offset, ScalarType? output_dtype=None) -> Tensor",
       infer>,
    Op<"rms_norm_forward(Tensor x, Tensor? weight, float eps, float weight_offset, ScalarType? output_dtype=None) -> "
       "(Tensor output, Tensor rstd)",
       forward>,
    Op<"add_rms_norm(Tensor x, Tensor residual, Tensor? weight, float eps, float weight_offset, ScalarType? "
       "output_dtype=None) "
       "-> (Tensor output, Tensor sum)",
       add_infer>,
    Op<"add_rms_norm_forward(Tensor x, Tensor residual, Tensor? weight, float eps, float weight_offset, ScalarType? "
       "output_dtype=None) "
       "-> (Tensor output, Tensor sum, Tensor rstd)",
       add_forward>,
    Op<"rms_norm_backward(Tensor grad_output, Tensor value, Tensor? weight, Tensor rstd, Tensor? grad_sum, "
       "float weight_offset, bool input_grad, bool weight_grad) -> (Tensor grad_input, Tensor grad_weight)",
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
