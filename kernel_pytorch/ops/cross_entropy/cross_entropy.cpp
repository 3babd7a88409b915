#include "kernel_pytorch/ops/cross_entropy/cross_entropy.h"

#include <cmath>

#include "kernel_pytorch/base/error.h"
#include "kernel_pytorch/device/rehearsal.h"
#include "kernel_pytorch/ops/cross_entropy/operation.h"
#include "kernel_pytorch/ops/support/argument_check.h"
#include "kernel_pytorch/registry/choose.h"

namespace kernel_pytorch::cross_entropy {
namespace {

constexpr std::string_view kOp = "cross_entropy";

void check_options(Options& options, const TensorView& logits) {
  const int64_t columns = columns_of(logits);
  KP_CHECK(options.label_smoothing >= 0 && options.label_smoothing <= 1, kOp, ": label_smoothing is ",
           options.label_smoothing, "; it must lie in [0, 1]");
  KP_CHECK(std::isfinite(options.z_loss), kOp, ": z_loss is ", options.z_loss, "; it must be finite");
  KP_CHECK(options.softcap >= 0 && std::isfinite(options.softcap), kOp, ": softcap is ", options.softcap,
           "; it must be positive, or 0 for none");
  if (options.vocabulary == 0) options.vocabulary = columns;
  KP_CHECK(options.first_column >= 0 && options.first_column + columns <= options.vocabulary, kOp, ": columns ",
           options.first_column, " to ", options.first_column + columns, " are not within the vocabulary of ",
           options.vocabulary);
  KP_CHECK(columns > 0 || rows_of(logits) == 0, kOp, ": logits have shape ", shape_text(logits.shape()),
           "; there must be at least one class");
}

// On the CPU a wrong target can be named before anything is written.
void check_targets(const TensorView& target, const Options& options) {
  for (int64_t row = 0; row < target.element_count(); ++row) {
    const int64_t index = target_at(target, row);
    KP_CHECK(index == options.ignore_index || (index >= 0 && index < options.vocabulary), kOp, ": target ", index,
             " of row ", row, " is not in [0, ", options.vocabulary, ") and is not ignore_index, which is ",
             options.ignore_index);
  }
}

void check_inputs(const ArgumentCheck& check, Problem& problem) {
  check.check_main();
  check_options(problem.options, problem.logits);
  const int64_t rows = rows_of(problem.logits);
  KP_CHECK(problem.target.is_present(), kOp, ": target is missing");
  check.check_device("target", problem.target);
  KP_CHECK(problem.target.dtype == DType::kInt64 || problem.target.dtype == DType::kInt32, kOp, ": target is ",
           problem.target.dtype, "; it must be int64 or int32 class indices (probabilities are not supported)");
  KP_CHECK(problem.target.element_count() == rows && is_contiguous(problem.target), kOp, ": target has shape ",
           shape_text(problem.target.shape()), "; it must be contiguous with one element for each of the ", rows,
           " rows of logits ", shape_text(problem.logits.shape()));
  const TensorView& weight = problem.weight;
  if (weight.is_present()) {
    check.check_device("weight", weight);
    KP_CHECK(weight.rank == 1 && weight.size(0) == problem.options.vocabulary, kOp, ": weight has shape ",
             shape_text(weight.shape()), ", there are ", problem.options.vocabulary, " classes; it must have one each");
    const DType type = problem.logits.dtype;
    KP_CHECK(weight.dtype == type || (weight.dtype == DType::kFloat32 && type != DType::kFloat64), kOp, ": weight is ",
             weight.dtype, ", logits are ", type, "; it must be ", type_or_wider(type));
    KP_CHECK(weight.size(0) <= 1 || weight.stride(0) == 1, kOp, ": weight has stride ", weight.stride(0),
             "; make it contiguous");
  }
  check.check_output("grad_logits", problem.grad_logits);
  KP_CHECK(problem.grad_logits.data != problem.logits.data || !problem.grad_logits.is_present() || rows == 0 ||
               is_contiguous(problem.logits),
           kOp, ": grad_logits are the logits, which have strides ",
           shape_text({problem.logits.strides.data(), static_cast<size_t>(problem.logits.rank)}),
           "; in place they must be contiguous");
  if (check.device.kind == DeviceKind::kCpu && problem.target.data != nullptr && !Rehearsal::is_running())
    check_targets(problem.target, problem.options);
}

void check_partials(const ArgumentCheck& check, const Problem& problem) {
  const TensorView& partials = problem.partials;
  if (!partials.is_present()) return;
  check.check_device("partials", partials);
  const DType wanted = problem.logits.dtype == DType::kFloat64 ? DType::kFloat64 : DType::kFloat32;
  KP_CHECK(
      partials.dtype == wanted && is_contiguous(partials) && partials.element_count() == 4 * rows_of(problem.logits),
      kOp, ": partials are ", partials, "; they must be ", wanted, ", contiguous, four for each of the ",
      rows_of(problem.logits), " rows");
  const bool is_alone = !problem.loss.is_present() && !problem.lse.is_present() && !problem.total.is_present() &&
                        !problem.grad_logits.is_present() && !problem.weight.is_present();
  KP_CHECK(is_alone, kOp, ": partials are asked for together with another output or a weight; ask for them alone");
}

// Contiguous values as a vector, whatever their shape.
void flatten(TensorView& view) {
  if (view.is_present()) view = contiguous_view(view.data, view.dtype, {view.element_count()}, view.device);
}

void normalize(Problem& problem) {
  TensorView* views[] = {&problem.logits, &problem.grad_logits};
  merge_leading_dimensions(views);
  for (TensorView* view :
       {&problem.target, &problem.given_lse, &problem.grad_loss, &problem.loss, &problem.lse, &problem.total}) {
    flatten(*view);
  }
  TensorView& partials = problem.partials;
  if (partials.is_present()) {
    partials = contiguous_view(partials.data, partials.dtype, {partials.element_count() / 4, 4}, partials.device);
  }
}

}  // namespace

void check_forward(Problem& problem, Device device) {
  const ArgumentCheck check{kOp, "logits", problem.logits, device};
  check_inputs(check, problem);
  check.check_statistics("loss", problem.loss);
  check.check_statistics("lse", problem.lse);
  check_partials(check, problem);
  KP_CHECK(std::isfinite(problem.gradient_scale), kOp, ": gradient_scale is ", problem.gradient_scale,
           "; it must be finite");
  if (problem.total.is_present()) {
    KP_CHECK(problem.reduction != Reduction::kNone, kOp, ": total is asked for with reduction none");
    KP_CHECK(problem.loss.is_present(), kOp, ": total is asked for without loss, which it is the sum of");
    check.check_device("total", problem.total);
    KP_CHECK(problem.total.element_count() == 1 && problem.total.dtype == problem.loss.dtype, kOp, ": total is ",
             problem.total, "; it must be one ", problem.loss.dtype);
  }
  normalize(problem);
}

void forward(const Forward& arguments, Context& context) {
  Problem problem{.logits = arguments.logits,
                  .target = arguments.target,
                  .weight = arguments.weight,
                  .given_lse = {},
                  .grad_loss = {},
                  .loss = arguments.loss,
                  .lse = arguments.lse,
                  .total = arguments.total,
                  .grad_logits = arguments.grad_logits,
                  .partials = arguments.partials,
                  .options = arguments.options,
                  .reduction = arguments.reduction,
                  .gradient_scale = arguments.gradient_scale};
  check_forward(problem, context.device());
  registry::run_best(kForward, problem, context);
}

void check_backward(Problem& problem, Device device) {
  const ArgumentCheck check{kOp, "logits", problem.logits, device};
  check_inputs(check, problem);
  KP_CHECK(problem.given_lse.is_present(), kOp, " backward: lse is missing; forward returns it");
  check.check_statistics("lse", problem.given_lse);
  KP_CHECK(problem.grad_logits.is_present(), kOp, " backward: grad_logits are missing");
  const TensorView& gradient = problem.grad_loss;
  KP_CHECK(gradient.is_present(), kOp, " backward: grad_loss is missing");
  check.check_device("grad_loss", gradient);
  const int64_t rows = rows_of(problem.logits);
  KP_CHECK(gradient.dtype == problem.given_lse.dtype && is_contiguous(gradient) &&
               (gradient.element_count() == rows || gradient.element_count() == 1),
           kOp, " backward: grad_loss is ", gradient, "; it must be ", problem.given_lse.dtype,
           ", contiguous, with one element or one for each of the ", rows, " rows");
  normalize(problem);
}

void backward(const Backward& arguments, Context& context) {
  Problem problem{.logits = arguments.logits,
                  .target = arguments.target,
                  .weight = arguments.weight,
                  .given_lse = arguments.lse,
                  .grad_loss = arguments.grad_loss,
                  .loss = {},
                  .lse = {},
                  .total = {},
                  .grad_logits = arguments.grad_logits,
                  .partials = {},
                  .options = arguments.options,
                  .reduction = Reduction::kNone,
                  .gradient_scale = 1};
  check_backward(problem, context.device());
  registry::run_best(kBackward, problem, context);
}

void forward_rows(const Forward& arguments, Context& context) {
  Forward rows = arguments;
  rows.reduction = Reduction::kNone;
  forward(rows, context);
}

void reduce(const Reduced& arguments, Context& context) {
  const TensorView& logits = arguments.logits;
  const ScratchScope scope(context.scratch);
  // The rows' losses, which nobody asked for.
  TensorView losses =
      contiguous_view(nullptr, statistic_type(logits.dtype), {logits.rank < 1 ? 0 : rows_of(logits)}, logits.device);
  losses.data = context.scratch->allocate(static_cast<size_t>(losses.byte_count()));
  forward({.logits = logits,
           .target = arguments.target,
           .weight = arguments.weight,
           .options = arguments.options,
           .reduction = arguments.mean ? Reduction::kMean : Reduction::kSum,
           .loss = losses,
           .total = arguments.output,
           .grad_logits = arguments.grad_logits},
          context);
}

void check_rescale(RescaleProblem& problem, Device device) {
  const ArgumentCheck check{"cross_entropy rescale", "tensor", problem.tensor, device};
  check.check_main();
  check.check_output("tensor", problem.tensor);
  const DType wanted = problem.tensor.dtype == DType::kFloat64 ? DType::kFloat64 : DType::kFloat32;
  KP_CHECK(problem.scale.is_present(), check.op, ": scale is missing");
  check.check_device("scale", problem.scale);
  KP_CHECK(problem.scale.element_count() == 1 && problem.scale.dtype == wanted, check.op, ": scale is ", problem.scale,
           "; it must be one ", wanted);
  flatten(problem.tensor);
  flatten(problem.scale);
}

void rescale(const Rescale& arguments, Context& context) {
  RescaleProblem problem{.tensor = arguments.tensor, .scale = arguments.scale};
  check_rescale(problem, context.device());
  registry::run_best(kRescale, problem, context);
}

}  // namespace kernel_pytorch::cross_entropy
