// torch.ops.kernel_pytorch.cross_entropy*: schemas and functions. Gradients, shape functions and batching rules are
// Python's (python/kernel_pytorch/_ops/cross_entropy.py). cross_entropy reduces, and its forward returns the gradient
// for a loss whose own gradient is 1; cross_entropy_rows does not reduce, and its backward reads the logits again.
#include "kernel_pytorch/ops/cross_entropy/cross_entropy.h"

#include "kernel_pytorch/base/rows.h"
#include "kernel_pytorch/torch/op.h"

namespace kernel_pytorch::torch_ops {
namespace {

using cross_entropy::Options;
using cross_entropy::Reduction;

DType wide_type(const TensorView& logits) {
  return logits.dtype == DType::kFloat64 ? DType::kFloat64 : DType::kFloat32;
}

// The rows' losses, which nobody asked for: memory for the length of the call.
TensorView scratch_losses(Call& call, const TensorView& logits) {
  const int64_t rows = logits.rank < 1 ? 0 : rows_of(logits);
  TensorView losses = contiguous_view(nullptr, wide_type(logits), {rows}, logits.device);
  losses.data = call.context().scratch->allocate(static_cast<size_t>(losses.byte_count()));
  return losses;
}

Options options_of(int64_t ignore_index, double label_smoothing, double z_loss, double softcap) {
  return {.ignore_index = ignore_index, .label_smoothing = label_smoothing, .z_loss = z_loss, .softcap = softcap};
}

void run_reduced(Call& call, const TensorView& logits, const TensorView& target, const TensorView& weight,
                 const Options& options, bool mean, const TensorView& total, const TensorView& gradient) {
  cross_entropy::forward({.logits = logits,
                          .target = target,
                          .weight = weight,
                          .options = options,
                          .reduction = mean ? Reduction::kMean : Reduction::kSum,
                          .loss = scratch_losses(call, logits),
                          .total = total,
                          .grad_logits = gradient},
                         call.context());
}

void infer(Call& call, const TensorView& logits, const RowView& target, const ParameterView& weight,
           int64_t ignore_index, double label_smoothing, double z_loss, double softcap, bool mean) {
  run_reduced(call, logits, target, weight, options_of(ignore_index, label_smoothing, z_loss, softcap), mean,
              call.output({}, wide_type(logits)), {});
}

void forward(Call& call, const TensorView& logits, const RowView& target, const ParameterView& weight,
             int64_t ignore_index, double label_smoothing, double z_loss, double softcap, bool mean) {
  const TensorView total = call.output({}, wide_type(logits));
  run_reduced(call, logits, target, weight, options_of(ignore_index, label_smoothing, z_loss, softcap), mean, total,
              call.output_like(logits));
}

// The logits become their gradient.
void in_place(Call& call, const TensorView& logits, const RowView& target, const ParameterView& weight,
              int64_t ignore_index, double label_smoothing, double z_loss, double softcap, bool mean) {
  run_reduced(call, logits, target, weight, options_of(ignore_index, label_smoothing, z_loss, softcap), mean,
              call.output({}, wide_type(logits)), logits);
}

void rows_infer(Call& call, const TensorView& logits, const RowView& target, const ParameterView& weight,
                int64_t ignore_index, double label_smoothing, double z_loss, double softcap) {
  cross_entropy::forward({.logits = logits,
                          .target = target,
                          .weight = weight,
                          .options = options_of(ignore_index, label_smoothing, z_loss, softcap),
                          .reduction = Reduction::kNone,
                          .loss = call.output_row_statistic(logits)},
                         call.context());
}

void rows_forward(Call& call, const TensorView& logits, const RowView& target, const ParameterView& weight,
                  int64_t ignore_index, double label_smoothing, double z_loss, double softcap) {
  const TensorView loss = call.output_row_statistic(logits);
  cross_entropy::forward({.logits = logits,
                          .target = target,
                          .weight = weight,
                          .options = options_of(ignore_index, label_smoothing, z_loss, softcap),
                          .reduction = Reduction::kNone,
                          .loss = loss,
                          .lse = call.output_row_statistic(logits)},
                         call.context());
}

void rows_backward(Call& call, const RowView& grad_output, const TensorView& logits, const RowView& target,
                   const ParameterView& weight, const RowView& lse, int64_t ignore_index, double label_smoothing,
                   double z_loss, double softcap, int64_t vocabulary, int64_t first_column) {
  Options options = options_of(ignore_index, label_smoothing, z_loss, softcap);
  options.vocabulary = vocabulary;
  options.first_column = first_column;
  cross_entropy::backward({.logits = logits,
                           .target = target,
                           .weight = weight,
                           .options = options,
                           .lse = lse,
                           .grad_loss = grad_output,
                           .grad_logits = call.output_like(logits)},
                          call.context());
}

void partials(Call& call, const TensorView& logits, const RowView& target, int64_t ignore_index, double softcap,
              int64_t vocabulary, int64_t first_column) {
  Options options = options_of(ignore_index, 0, 0, softcap);
  options.vocabulary = vocabulary;
  options.first_column = first_column;
  std::vector<int64_t> sizes(logits.shape().begin(), logits.shape().end());
  if (!sizes.empty()) sizes.back() = 4;
  cross_entropy::forward({.logits = logits,
                          .target = target,
                          .options = options,
                          .reduction = Reduction::kNone,
                          .partials = call.output(sizes, wide_type(logits))},
                         call.context());
}

void rescale(Call& call, const TensorView& tensor, const TensorView& scale) {
  cross_entropy::rescale({.tensor = tensor, .scale = scale}, call.context());
}

using Ops = OpList<
    Op<"cross_entropy(Tensor logits, Tensor target, Tensor? weight, int ignore_index, float label_smoothing, "
       "float z_loss, float softcap, bool mean) -> Tensor",
       infer>,
    Op<"cross_entropy_forward(Tensor logits, Tensor target, Tensor? weight, int ignore_index, float label_smoothing, "
       "float z_loss, float softcap, bool mean) -> (Tensor output, Tensor grad_logits)",
       forward>,
    Op<"cross_entropy_(Tensor(a!) logits, Tensor target, Tensor? weight, int ignore_index, float label_smoothing, "
       "float z_loss, float softcap, bool mean) -> Tensor",
       in_place>,
    Op<"cross_entropy_rows(Tensor logits, Tensor target, Tensor? weight, int ignore_index, float label_smoothing, "
       "float z_loss, float softcap) -> Tensor",
       rows_infer>,
    Op<"cross_entropy_rows_forward(Tensor logits, Tensor target, Tensor? weight, int ignore_index, "
       "float label_smoothing, float z_loss, float softcap) -> (Tensor output, Tensor lse)",
       rows_forward>,
    Op<"cross_entropy_rows_backward(Tensor grad_output, Tensor logits, Tensor target, Tensor? weight, Tensor lse, "
       "int ignore_index, float label_smoothing, float z_loss, float softcap, int vocabulary, int first_column) "
       "-> Tensor",
       rows_backward>,
    Op<"cross_entropy_partials(Tensor logits, Tensor target, int ignore_index, float softcap, int vocabulary, "
       "int first_column) -> Tensor",
       partials>,
    Op<"cross_entropy_rescale_(Tensor(a!) tensor, Tensor scale) -> ()", rescale>>;

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
