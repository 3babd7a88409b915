// torch.ops.kernel_pytorch.adamw_ and reduce_norm: schemas and functions. The optimizer is Python's
// (python/kernel_pytorch/optim.py).
#include "kernel_pytorch/ops/adamw/adamw.h"

#include "kernel_pytorch/base/error.h"
#include "kernel_pytorch/ops/reduce_norm/reduce_norm.h"
#include "kernel_pytorch/torch/op.h"

namespace kernel_pytorch::torch_ops {
namespace {

using Views = std::vector<TensorView>;

// One entry of a list, absent where the whole list is empty.
TensorView entry_of(const char* name, const Views& views, size_t index, size_t expected) {
  KP_CHECK(views.empty() || views.size() == expected, "adamw: ", name, " has ", views.size(), " tensors, parameters ",
           expected, "; give one for each");
  return views.empty() ? TensorView() : views[index];
}

void step(Call& call, const Views& parameters, const Views& gradients, const Views& exp_avgs, const Views& exp_avg_sqs,
          const Views& max_exp_avg_sqs, const Views& masters, const Views& steps, const TensorView& lr_tensor,
          const TensorView& grad_scale, const TensorView& found_inf, const TensorView& total_norm,
          const ParameterView& seed, double lr, double beta1, double beta2, double eps, double weight_decay,
          double max_norm, bool maximize) {
  adamw::Step arguments{.parameters = {},
                        .lr = lr,
                        .beta1 = beta1,
                        .beta2 = beta2,
                        .eps = eps,
                        .weight_decay = weight_decay,
                        .max_norm = max_norm,
                        .maximize = maximize,
                        .lr_tensor = lr_tensor,
                        .grad_scale = grad_scale,
                        .found_inf = found_inf,
                        .total_norm = total_norm,
                        .seed = seed};
  arguments.parameters.reserve(parameters.size());
  const size_t count = parameters.size();
  for (size_t i = 0; i < count; ++i) {
    arguments.parameters.push_back({.parameter = parameters[i],
                                    .gradient = entry_of("gradients", gradients, i, count),
                                    .exp_avg = entry_of("exp_avgs", exp_avgs, i, count),
                                    .exp_avg_sq = entry_of("exp_avg_sqs", exp_avg_sqs, i, count),
                                    .max_exp_avg_sq = entry_of("max_exp_avg_sqs", max_exp_avg_sqs, i, count),
                                    .master = entry_of("masters", masters, i, count),
                                    .step = entry_of("steps", steps, i, count)});
  }
  adamw::step(arguments, call.context());
}

void norm(Call& call, const Views& tensors) {
  DType dtype = DType::kFloat32;
  for (const TensorView& tensor : tensors) {
    if (tensor.dtype == DType::kFloat64) dtype = DType::kFloat64;
  }
  reduce_norm::norm({.tensors = tensors, .output = call.output({}, dtype)}, call.context());
}

using Ops =
    OpList<Op<"adamw_(Tensor(a!)[] parameters, Tensor[] gradients, Tensor(b!)[] exp_avgs, Tensor(c!)[] exp_avg_sqs, "
              "Tensor(d!)[] max_exp_avg_sqs, Tensor(e!)[] masters, Tensor(f!)[] steps, Tensor? lr_tensor, "
              "Tensor? grad_scale, Tensor? found_inf, Tensor? total_norm, Tensor? seed, float lr, float beta1, "
              "float beta2, float eps, float weight_decay, float max_norm, bool maximize) -> ()",
              step>,
           Op<"reduce_norm(Tensor[] tensors) -> Tensor", norm>>;

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
