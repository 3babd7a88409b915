// torch.ops.kernel_pytorch.rms_norm*: schemas and their CPU and CUDA implementations, which are the same function since
// the core chooses by device. Gradients, shape functions and batching rules are Python's (kernel_pytorch/_torch.py).
#include "kernel_pytorch/ops/rms_norm/rms_norm.h"

#include <torch/csrc/stable/library.h>

#include <tuple>

#include "kernel_pytorch/torch/border.h"
#include "kernel_pytorch/torch/context.h"
#include "kernel_pytorch/torch/ops/row_outputs.h"
#include "kernel_pytorch/torch/tensor_view.h"

namespace kernel_pytorch::torch_ops {
namespace {

rms_norm::Forward forward_arguments(const Tensor& x, Tensor& weight, double eps, double weight_offset) {
  return {.x = view_of(x, "rms_norm: x"),
          .residual = {},
          .weight = parameter_view_of(weight, "rms_norm: weight"),
          .eps = eps,
          .weight_offset = weight_offset,
          .output = {},
          .sum = {},
          .rstd = {}};
}

void run(const rms_norm::Forward& arguments) {
  TorchContext context(arguments.x.device);
  rms_norm::forward(arguments, context);
}

Returned infer(Handle x, OptionalHandle weight, double eps, double weight_offset) {
  return at_border([&, x = Tensor(x), weight = Tensor(weight)]() mutable {
    rms_norm::Forward arguments = forward_arguments(x, weight, eps, weight_offset);
    NewTensor output = make_like(arguments.x);
    arguments.output = output.view;
    run(arguments);
    return output.tensor.release();
  });
}

std::tuple<Returned, Returned> forward(Handle x, OptionalHandle weight, double eps, double weight_offset) {
  return at_border([&, x = Tensor(x), weight = Tensor(weight)]() mutable {
    rms_norm::Forward arguments = forward_arguments(x, weight, eps, weight_offset);
    NewTensor output = make_like(arguments.x);
    NewTensor rstd = make_row_statistic(arguments.x);
    arguments.output = output.view;
    arguments.rstd = rstd.view;
    run(arguments);
    return std::tuple(output.tensor.release(), rstd.tensor.release());
  });
}

std::tuple<Returned, Returned> add_infer(Handle x, Handle residual, OptionalHandle weight, double eps,
                                         double weight_offset) {
  return at_border([&, x = Tensor(x), residual = Tensor(residual), weight = Tensor(weight)]() mutable {
    rms_norm::Forward arguments = forward_arguments(x, weight, eps, weight_offset);
    arguments.residual = view_of(residual, "rms_norm: residual");
    NewTensor output = make_like(arguments.x);
    NewTensor sum = make_like(arguments.x);
    arguments.output = output.view;
    arguments.sum = sum.view;
    run(arguments);
    return std::tuple(output.tensor.release(), sum.tensor.release());
  });
}

std::tuple<Returned, Returned, Returned> add_forward(Handle x, Handle residual, OptionalHandle weight, double eps,
                                                     double weight_offset) {
  return at_border([&, x = Tensor(x), residual = Tensor(residual), weight = Tensor(weight)]() mutable {
    rms_norm::Forward arguments = forward_arguments(x, weight, eps, weight_offset);
    arguments.residual = view_of(residual, "rms_norm: residual");
    NewTensor output = make_like(arguments.x);
    NewTensor sum = make_like(arguments.x);
    NewTensor rstd = make_row_statistic(arguments.x);
    arguments.output = output.view;
    arguments.sum = sum.view;
    arguments.rstd = rstd.view;
    run(arguments);
    return std::tuple(output.tensor.release(), sum.tensor.release(), rstd.tensor.release());
  });
}

std::tuple<Returned, Returned> backward(Handle grad_output, Handle value, OptionalHandle weight, Handle rstd,
                                        OptionalHandle grad_sum, double weight_offset, bool input_grad,
                                        bool weight_grad) {
  return at_border([&, grad_output = Tensor(grad_output), value = Tensor(value), weight = Tensor(weight),
                    rstd = Tensor(rstd), grad_sum = Tensor(grad_sum)]() mutable {
    rms_norm::Backward arguments{.grad_output = view_of(grad_output, "rms_norm backward: grad_output"),
                                 .value = view_of(value, "rms_norm backward: value"),
                                 .weight = parameter_view_of(weight, "rms_norm backward: weight"),
                                 .rstd = row_view_of(rstd, "rms_norm backward: rstd"),
                                 .weight_offset = weight_offset,
                                 .grad_sum = view_of(grad_sum, "rms_norm backward: grad_sum"),
                                 .grad_input = {},
                                 .grad_weight = {}};
    NewTensor grad_input = make_like_if(input_grad, arguments.value, arguments.value);
    NewTensor grad_weight = make_like_if(weight_grad, arguments.weight, arguments.value);
    arguments.grad_input = grad_input.view;
    arguments.grad_weight = grad_weight.view;
    TorchContext context(arguments.value.device);
    rms_norm::backward(arguments, context);
    return std::tuple(grad_input.tensor.release(), grad_weight.tensor.release());
  });
}

void implement(torch::stable::detail::StableLibrary& library) {
  library.impl("rms_norm", TORCH_BOX(&infer));
  library.impl("rms_norm_forward", TORCH_BOX(&forward));
  library.impl("add_rms_norm", TORCH_BOX(&add_infer));
  library.impl("add_rms_norm_forward", TORCH_BOX(&add_forward));
  library.impl("rms_norm_backward", TORCH_BOX(&backward));
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(kernel_pytorch, library) {
  library.def("rms_norm(Tensor x, Tensor? weight, float eps, float weight_offset) -> Tensor");
  library.def(
      "rms_norm_forward(Tensor x, Tensor? weight, float eps, float weight_offset) -> (Tensor output, Tensor rstd)");
  library.def(
      "add_rms_norm(Tensor x, Tensor residual, Tensor? weight, float eps, float weight_offset) "
      "-> (Tensor output, Tensor sum)");
  library.def(
      "add_rms_norm_forward(Tensor x, Tensor residual, Tensor? weight, float eps, float weight_offset) "
      "-> (Tensor output, Tensor sum, Tensor rstd)");
  library.def(
      "rms_norm_backward(Tensor grad_output, Tensor value, Tensor? weight, Tensor rstd, Tensor? grad_sum, "
      "float weight_offset, bool input_grad, bool weight_grad) -> (Tensor grad_input, Tensor grad_weight)");
}

STABLE_TORCH_LIBRARY_IMPL(kernel_pytorch, CPU, library) {
  implement(library);
}
STABLE_TORCH_LIBRARY_IMPL(kernel_pytorch, CUDA, library) {
  implement(library);
}

}  // namespace kernel_pytorch::torch_ops
