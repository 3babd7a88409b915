// torch.ops.kernel_pytorch.layer_norm*: schemas and their CPU and CUDA implementations, which are the same function
// since the core chooses by device. Gradients, shape functions and batching rules are Python's
// (kernel_pytorch/_torch.py).
#include "kernel_pytorch/ops/layer_norm/layer_norm.h"

#include <torch/csrc/stable/library.h>

#include <tuple>

#include "kernel_pytorch/torch/border.h"
#include "kernel_pytorch/torch/context.h"
#include "kernel_pytorch/torch/ops/row_outputs.h"
#include "kernel_pytorch/torch/tensor_view.h"

namespace kernel_pytorch::torch_ops {
namespace {

layer_norm::Forward forward_arguments(const Tensor& x, Tensor& weight, Tensor& bias, double eps) {
  return {.x = view_of(x, "layer_norm: x"),
          .residual = {},
          .weight = parameter_view_of(weight, "layer_norm: weight"),
          .bias = parameter_view_of(bias, "layer_norm: bias"),
          .eps = eps,
          .weight_offset = 0.0,
          .output = {},
          .sum = {},
          .mean = {},
          .rstd = {}};
}

void run(const layer_norm::Forward& arguments) {
  TorchContext context(arguments.x.device);
  layer_norm::forward(arguments, context);
}

Returned infer(Handle x, OptionalHandle weight, OptionalHandle bias, double eps) {
  return at_border([&, x = Tensor(x), weight = Tensor(weight), bias = Tensor(bias)]() mutable {
    layer_norm::Forward arguments = forward_arguments(x, weight, bias, eps);
    NewTensor output = make_like(arguments.x);
    arguments.output = output.view;
    run(arguments);
    return output.tensor.release();
  });
}

std::tuple<Returned, Returned, Returned> forward(Handle x, OptionalHandle weight, OptionalHandle bias, double eps) {
  return at_border([&, x = Tensor(x), weight = Tensor(weight), bias = Tensor(bias)]() mutable {
    layer_norm::Forward arguments = forward_arguments(x, weight, bias, eps);
    NewTensor output = make_like(arguments.x);
    NewTensor mean = make_row_statistic(arguments.x);
    NewTensor rstd = make_row_statistic(arguments.x);
    arguments.output = output.view;
    arguments.mean = mean.view;
    arguments.rstd = rstd.view;
    run(arguments);
    return std::tuple(output.tensor.release(), mean.tensor.release(), rstd.tensor.release());
  });
}

std::tuple<Returned, Returned> add_infer(Handle x, Handle residual, OptionalHandle weight, OptionalHandle bias,
                                         double eps) {
  return at_border(
      [&, x = Tensor(x), residual = Tensor(residual), weight = Tensor(weight), bias = Tensor(bias)]() mutable {
        layer_norm::Forward arguments = forward_arguments(x, weight, bias, eps);
        arguments.residual = view_of(residual, "layer_norm: residual");
        NewTensor output = make_like(arguments.x);
        NewTensor sum = make_like(arguments.x);
        arguments.output = output.view;
        arguments.sum = sum.view;
        run(arguments);
        return std::tuple(output.tensor.release(), sum.tensor.release());
      });
}

std::tuple<Returned, Returned, Returned, Returned> add_forward(Handle x, Handle residual, OptionalHandle weight,
                                                               OptionalHandle bias, double eps) {
  return at_border(
      [&, x = Tensor(x), residual = Tensor(residual), weight = Tensor(weight), bias = Tensor(bias)]() mutable {
        layer_norm::Forward arguments = forward_arguments(x, weight, bias, eps);
        arguments.residual = view_of(residual, "layer_norm: residual");
        NewTensor output = make_like(arguments.x);
        NewTensor sum = make_like(arguments.x);
        NewTensor mean = make_row_statistic(arguments.x);
        NewTensor rstd = make_row_statistic(arguments.x);
        arguments.output = output.view;
        arguments.sum = sum.view;
        arguments.mean = mean.view;
        arguments.rstd = rstd.view;
        run(arguments);
        return std::tuple(output.tensor.release(), sum.tensor.release(), mean.tensor.release(), rstd.tensor.release());
      });
}

// `bias` is here for the type of its gradient alone.
std::tuple<Returned, Returned, Returned> backward(Handle grad_output, Handle value, OptionalHandle weight,
                                                  OptionalHandle bias, Handle mean, Handle rstd,
                                                  OptionalHandle grad_sum, bool input_grad, bool weight_grad,
                                                  bool bias_grad) {
  return at_border([&, grad_output = Tensor(grad_output), value = Tensor(value), weight = Tensor(weight),
                    bias = Tensor(bias), mean = Tensor(mean), rstd = Tensor(rstd),
                    grad_sum = Tensor(grad_sum)]() mutable {
    layer_norm::Backward arguments{.grad_output = view_of(grad_output, "layer_norm backward: grad_output"),
                                   .value = view_of(value, "layer_norm backward: value"),
                                   .weight = parameter_view_of(weight, "layer_norm backward: weight"),
                                   .mean = row_view_of(mean, "layer_norm backward: mean"),
                                   .rstd = row_view_of(rstd, "layer_norm backward: rstd"),
                                   .weight_offset = 0.0,
                                   .grad_sum = view_of(grad_sum, "layer_norm backward: grad_sum"),
                                   .grad_input = {},
                                   .grad_weight = {},
                                   .grad_bias = {}};
    const TensorView bias_view = parameter_view_of(bias, "layer_norm backward: bias");
    NewTensor grad_input = make_like_if(input_grad, arguments.value, arguments.value);
    NewTensor grad_weight = make_like_if(weight_grad, arguments.weight, arguments.value);
    NewTensor grad_bias = make_like_if(bias_grad, bias_view, arguments.value);
    arguments.grad_input = grad_input.view;
    arguments.grad_weight = grad_weight.view;
    arguments.grad_bias = grad_bias.view;
    TorchContext context(arguments.value.device);
    layer_norm::backward(arguments, context);
    return std::tuple(grad_input.tensor.release(), grad_weight.tensor.release(), grad_bias.tensor.release());
  });
}

void implement(torch::stable::detail::StableLibrary& library) {
  library.impl("layer_norm", TORCH_BOX(&infer));
  library.impl("layer_norm_forward", TORCH_BOX(&forward));
  library.impl("add_layer_norm", TORCH_BOX(&add_infer));
  library.impl("add_layer_norm_forward", TORCH_BOX(&add_forward));
  library.impl("layer_norm_backward", TORCH_BOX(&backward));
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(kernel_pytorch, library) {
  library.def("layer_norm(Tensor x, Tensor? weight, Tensor? bias, float eps) -> Tensor");
  library.def(
      "layer_norm_forward(Tensor x, Tensor? weight, Tensor? bias, float eps) "
      "-> (Tensor output, Tensor mean, Tensor rstd)");
  library.def(
      "add_layer_norm(Tensor x, Tensor residual, Tensor? weight, Tensor? bias, float eps) "
      "-> (Tensor output, Tensor sum)");
  library.def(
      "add_layer_norm_forward(Tensor x, Tensor residual, Tensor? weight, Tensor? bias, float eps) "
      "-> (Tensor output, Tensor sum, Tensor mean, Tensor rstd)");
  library.def(
      "layer_norm_backward(Tensor grad_output, Tensor value, Tensor? weight, Tensor? bias, Tensor mean, Tensor rstd, "
      "Tensor? grad_sum, bool input_grad, bool weight_grad, bool bias_grad) "
      "-> (Tensor grad_input, Tensor grad_weight, Tensor grad_bias)");
}

STABLE_TORCH_LIBRARY_IMPL(kernel_pytorch, CPU, library) {
  implement(library);
}
STABLE_TORCH_LIBRARY_IMPL(kernel_pytorch, CUDA, library) {
  implement(library);
}

}  // namespace kernel_pytorch::torch_ops
