// The kernels of cross_entropy, best first, the reference last, and how problems of its kind are made and described.
#include <algorithm>

#include "kernel_pytorch/base/error.h"
#include "kernel_pytorch/ops/cross_entropy/operation.h"
#include "kernel_pytorch/ops/cross_entropy/shapes.h"
#include "kernel_pytorch/registry/op_entry.h"
#include "kernel_pytorch/registry/request_options.h"

namespace kernel_pytorch::cross_entropy {
namespace {

std::span<const registry::Kernel<Problem>> forward_kernels() {
  static const registry::Kernel<Problem> kKernels[] = {kCudaCluster, kCudaBlock, kCpu, kReference};
  return kKernels;
}
std::span<const registry::Kernel<Problem>> backward_kernels() {
  static const registry::Kernel<Problem> kKernels[] = {kCudaBlock, kCpu, kReference};
  return kKernels;
}
std::span<const registry::Kernel<RescaleProblem>> rescale_kernels() {
  static const registry::Kernel<RescaleProblem> kKernels[] = {kRescaleCuda, kRescaleCpu, kRescaleReference};
  return kKernels;
}

void describe(const Problem& problem, tuning::KeyBuilder& key) {
  key.field("rows", tuning::bucket(rows_of(problem.logits)));
  key.field("columns", columns_of(problem.logits));
  key.field("dtype", problem.logits.dtype);
  key.field("target", problem.target);
  key.field("weight", problem.weight);
  key.field("given_lse", problem.given_lse);
  key.field("grad_loss", problem.grad_loss);
  key.field("loss", problem.loss);
  key.field("lse", problem.lse);
  key.field("total", problem.total);
  key.field("grad_logits", problem.grad_logits);
  key.field("partials", problem.partials);
  key.field("reduction", static_cast<int64_t>(problem.reduction));
  key.field("softcap", problem.options.softcap != 0);
  key.field("smoothed", problem.options.label_smoothing != 0);
  key.field("dense", problem.logits.rank == 2 && problem.logits.strides[1] == 1);
}
void describe(const RescaleProblem& problem, tuning::KeyBuilder& key) {
  key.field("elements", tuning::bucket(problem.tensor.element_count()));
  key.field("dtype", problem.tensor.dtype);
  key.field("scale", problem.scale);
}

using registry::Role;

void visit_tensors(Problem& problem, registry::TensorVisitor visit, void* state) {
  const registry::PresentTensors call{visit, state};
  call("logits", Role::kInput, problem.logits);
  call("target", Role::kInput, problem.target);
  call("weight", Role::kInput, problem.weight);
  call("given_lse", Role::kInput, problem.given_lse);
  call("grad_loss", Role::kInput, problem.grad_loss);
  call("loss", Role::kOutput, problem.loss);
  call("lse", Role::kOutput, problem.lse);
  call("total", Role::kOutput, problem.total);
  call("grad_logits", Role::kOutput, problem.grad_logits);
  call("partials", Role::kOutput, problem.partials);
}
void visit_tensors(RescaleProblem& problem, registry::TensorVisitor visit, void* state) {
  visit(state, "tensor", Role::kUpdated, problem.tensor);
  visit(state, "scale", Role::kInput, problem.scale);
}

registry::Filling filling(const Problem& problem, std::string_view tensor) {
  if (tensor == "target") return {.content = registry::Content::kIndices, .limit = problem.options.vocabulary};
  const bool is_positive = tensor == "weight" || tensor == "given_lse";
  return {.content = is_positive ? registry::Content::kPositive : registry::Content::kNormal};
}
registry::Filling filling(const RescaleProblem&, std::string_view tensor) {
  return {.content = tensor == "tensor" ? registry::Content::kNormal : registry::Content::kPositive};
}

Problem shrink(const Problem& problem, int64_t elements) {
  Problem small = problem;
  if (problem.logits.rank != 2) return small;
  const int64_t rows = std::clamp<int64_t>(elements / std::max<int64_t>(columns_of(problem.logits), 1), 1,
                                           std::max<int64_t>(rows_of(problem.logits), 1));
  for (TensorView* view : {&small.logits, &small.target, &small.given_lse, &small.grad_loss, &small.loss, &small.lse,
                           &small.grad_logits}) {
    if (view->is_present()) view->sizes[0] = std::min(view->sizes[0], rows);
  }
  if (small.partials.is_present()) small.partials.sizes[0] = std::min(small.partials.sizes[0], 4 * rows);
  return small;
}

registry::Cost cost(const Problem& problem) {
  return {.bytes = registry::tensor_bytes(problem, visit_tensors), .flops = 8 * problem.logits.element_count()};
}
registry::Cost cost(const RescaleProblem& problem) {
  return {.bytes = registry::tensor_bytes(problem, visit_tensors), .flops = problem.tensor.element_count()};
}

Options options_of(const registry::ProblemRequest& request, int64_t columns) {
  registry::check_options(request, {"gradient", "partials", "reduction", "label_smoothing", "z_loss", "softcap",
                                    "weight", "ignore_index", "parts"});
  const auto parts = registry::integer_option(request, "parts", 1);
  KP_CHECK(parts >= 1, "option parts=", parts, ": at least one part is needed");
  return {.ignore_index = registry::integer_option(request, "ignore_index", -100),
          .label_smoothing = registry::number_option(request, "label_smoothing", 0),
          .z_loss = registry::number_option(request, "z_loss", 0),
          .softcap = registry::number_option(request, "softcap", 0),
          .vocabulary = columns * parts,
          .first_column = columns * (parts / 2)};  // of several parts, one in the middle
}

// Options understood: gradient=0|1, partials=0|1, reduction=none|sum|mean, label_smoothing, z_loss, softcap,
// ignore_index, weight=none|same|fp32, parts=N (of the vocabulary, one of which this is).
Problem make_forward(const registry::ProblemRequest& request) {
  Problem problem;
  problem.logits = registry::rows_view(request);
  const int64_t rows = problem.logits.sizes[0], columns = problem.logits.sizes[1];
  problem.options = options_of(request, columns);
  problem.reduction =
      static_cast<Reduction>(registry::choice_option(request, "reduction", {"none", "sum", "mean"}, "mean"));
  const DType wide = request.dtype == DType::kFloat64 ? DType::kFloat64 : DType::kFloat32;
  const auto vector = [&](DType dtype, int64_t size) {
    return contiguous_view(nullptr, dtype, {size}, request.device);
  };
  problem.target = vector(DType::kInt64, rows);
  const int weight = registry::choice_option(request, "weight", {"none", "same", "fp32"}, "none");
  if (weight != 0) problem.weight = vector(weight == 1 ? request.dtype : wide, problem.options.vocabulary);
  if (registry::flag_option(request, "partials", false)) {
    problem.partials = vector(wide, 4 * rows);
    return problem;
  }
  problem.loss = problem.lse = vector(wide, rows);
  if (problem.reduction != Reduction::kNone) problem.total = vector(wide, 1);
  if (registry::flag_option(request, "gradient", true)) problem.grad_logits = problem.logits;
  return problem;
}

Problem make_backward(const registry::ProblemRequest& request) {
  Problem problem = make_forward(request);
  problem.given_lse = problem.grad_loss =
      contiguous_view(nullptr, request.dtype == DType::kFloat64 ? DType::kFloat64 : DType::kFloat32,
                      {problem.logits.sizes[0]}, request.device);
  if (problem.reduction != Reduction::kNone) problem.grad_loss.sizes[0] = 1;
  problem.loss = problem.lse = problem.total = problem.partials = {};
  problem.reduction = Reduction::kNone;
  problem.grad_logits = problem.logits;
  return problem;
}

RescaleProblem make_rescale(const registry::ProblemRequest& request) {
  const TensorView rows = registry::rows_view(request);
  const TensorView factor = contiguous_view(
      nullptr, request.dtype == DType::kFloat64 ? DType::kFloat64 : DType::kFloat32, {1}, request.device);
  return {.tensor = contiguous_view(nullptr, request.dtype, {rows.element_count()}, request.device), .scale = factor};
}

}  // namespace

constinit const registry::Operation<Problem> kForward{.name = "cross_entropy_forward",
                                                      .kernels = forward_kernels,
                                                      .describe = describe,
                                                      .visit_tensors = visit_tensors,
                                                      .filling = filling,
                                                      .make = make_forward,
                                                      .shrink = shrink,
                                                      .cost = cost,
                                                      .shapes = shapes};
constinit const registry::Operation<Problem> kBackward{.name = "cross_entropy_backward",
                                                       .kernels = backward_kernels,
                                                       .describe = describe,
                                                       .visit_tensors = visit_tensors,
                                                       .filling = filling,
                                                       .make = make_backward,
                                                       .shrink = shrink,
                                                       .cost = cost,
                                                       .shapes = shapes};
constinit const registry::Operation<RescaleProblem> kRescale{.name = "cross_entropy_rescale",
                                                             .kernels = rescale_kernels,
                                                             .describe = describe,
                                                             .visit_tensors = visit_tensors,
                                                             .filling = filling,
                                                             .make = make_rescale,
                                                             .shrink = nullptr,
                                                             .cost = cost,
                                                             .shapes = rescale_shapes};

namespace {

constexpr auto kDeclarations = registry::join(
    registry::differentiable<Reduced, reduce>("cross_entropy", "cross_entropy_forward", kReducedFields),
    registry::plain<Reduced, reduce>("cross_entropy_", kReducedFields, {.in_place = true}),
    registry::differentiable<Forward, forward_rows>("cross_entropy_rows", "cross_entropy_rows_forward", kRowsFields,
                                                    {.without = "partials"}),
    registry::plain<Backward, backward>("cross_entropy_rows_backward", kBackwardFields,
                                        {.shown = "vocabulary first_column"}),
    registry::plain<Forward, forward_rows>(
        "cross_entropy_partials", kRowsFields,
        {.never = "weight", .without = "label_smoothing z_loss output lse", .shown = "vocabulary first_column"}),
    registry::plain<Rescale, rescale>("cross_entropy_rescale_", kRescaleFields));

}  // namespace

extern const registry::OpEntry kEntry;
constinit const registry::OpEntry kEntry{.declarations = kDeclarations,
                                         .operations = registry::erased<kForward, kBackward, kRescale>};

}  // namespace kernel_pytorch::cross_entropy
