// torch.ops.kernel_pytorch.linear_cross_entropy*: the mean of all rows' losses, and with _forward its gradients,
// computed with it. How it becomes a mean of the rows that count is Python's
// (python/kernel_pytorch/_ops/linear_cross_entropy.py).
#include "kernel_pytorch/ops/linear_cross_entropy/linear_cross_entropy.h"

#include "kernel_pytorch/base/error.h"
#include "kernel_pytorch/torch/op.h"

namespace kernel_pytorch::torch_ops {
namespace {

TensorView matrix_of(const MatrixView& view) {
  TensorView matrix = view;
  if (view.given.rank != 2) return view.given;
  matrix.rank = 2;
  matrix.sizes = {view.sizes[1], view.sizes[2]};
  matrix.strides = {view.strides[1], view.strides[2]};
  return matrix;
}

linear_cross_entropy::Forward arguments_of(Call& call, const MergedRowsView& hidden, const MatrixView& weight,
                                           const RowView& target, const ParameterView& class_weight,
                                           int64_t ignore_index, double label_smoothing, double z_loss, double softcap,
                                           int64_t chunk_bytes) {
  KP_CHECK(hidden.given.rank >= 1, "linear_cross_entropy: hidden has no dimensions; it is [..., size]");
  return {.hidden = hidden,
          .weight = matrix_of(weight),
          .target = target,
          .class_weight = class_weight,
          .options = {.ignore_index = ignore_index,
                      .label_smoothing = label_smoothing,
                      .z_loss = z_loss,
                      .softcap = softcap},
          .chunk_bytes = chunk_bytes,
          .loss = call.output({}, hidden.dtype == DType::kFloat64 ? DType::kFloat64 : DType::kFloat32)};
}

void infer(Call& call, const MergedRowsView& hidden, const MatrixView& weight, const RowView& target,
           const ParameterView& class_weight, int64_t ignore_index, double label_smoothing, double z_loss,
           double softcap, int64_t chunk_bytes, bool, bool, bool) {
  linear_cross_entropy::forward(arguments_of(call, hidden, weight, target, class_weight, ignore_index, label_smoothing,
                                             z_loss, softcap, chunk_bytes),
                                call.context());
}

void forward(Call& call, const MergedRowsView& hidden, const MatrixView& weight, const RowView& target,
             const ParameterView& class_weight, int64_t ignore_index, double label_smoothing, double z_loss,
             double softcap, int64_t chunk_bytes, bool hidden_grad, bool weight_grad, bool wide) {
  linear_cross_entropy::Forward arguments = arguments_of(call, hidden, weight, target, class_weight, ignore_index,
                                                         label_smoothing, z_loss, softcap, chunk_bytes);
  const TensorView grad_hidden = call.output_like_if(hidden_grad, hidden.given, hidden);
  if (hidden_grad) {
    arguments.grad_hidden =
        contiguous_view(grad_hidden.data, hidden.dtype, {hidden.sizes[0], hidden.sizes[1]}, hidden.device);
  }
  TensorView like = arguments.weight;
  if (wide && like.dtype != DType::kFloat64) like.dtype = DType::kFloat32;
  arguments.grad_weight = call.output_like_if(weight_grad, like, hidden);
  linear_cross_entropy::forward(arguments, call.context());
}

using Ops = OpList<
    Op<"linear_cross_entropy(Tensor hidden, Tensor weight, Tensor target, Tensor? class_weight, int ignore_index, "
       "float label_smoothing, float z_loss, float softcap, int chunk_bytes, bool hidden_grad, bool weight_grad, "
       "bool wide) -> Tensor",
       infer>,
    Op<"linear_cross_entropy_forward(Tensor hidden, Tensor weight, Tensor target, Tensor? class_weight, "
       "int ignore_index, float label_smoothing, float z_loss, float softcap, int chunk_bytes, bool hidden_grad, "
       "bool weight_grad, bool wide) -> (Tensor output, Tensor grad_hidden, Tensor grad_weight)",
       forward>>;

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
