// The kernels of cross_entropy, best first, the reference last, and how problems of its kind are made and described.
#include <algorithm>
#include <vector>

#include "kernel_pytorch/base/error.h"
#include "kernel_pytorch/ops/cross_entropy/operation.h"
#include "kernel_pytorch/registry/declared.h"
#include "kernel_pytorch/registry/op_entry.h"
#include "kernel_pytorch/registry/request_options.h"

namespace kernel_pytorch::cross_entropy {
namespace {

constexpr auto kOptionKeys = field_group<Options>(
    option<&Options::ignore_index>(), option<&Options::label_smoothing>({.key = KeyPart::kPresence}),
    option<&Options::z_loss>(), option<&Options::softcap>({.key = KeyPart::kPresence}), option<&Options::vocabulary>(),
    option<&Options::first_column>());
constexpr auto kProblemFields = fields<Problem>(
    input<&Problem::logits>({.shape = "... columns", .leads = true}), input<&Problem::target>(),
    optional_input<&Problem::weight>(), optional_input<&Problem::given_lse>(), optional_input<&Problem::grad_loss>(),
    output<&Problem::loss>({.optional = true}), output<&Problem::lse>({.optional = true}),
    output<&Problem::total>({.optional = true}), output<&Problem::grad_logits>({.optional = true}),
    output<&Problem::partials>({.optional = true}), all_of<&Problem::options, kOptionKeys>(),
    option<&Problem::reduction>({.key = KeyPart::kValue, .choices = "none sum mean"}),
    option<&Problem::gradient_scale>());
constexpr auto kRescaleProblem = fields<RescaleProblem>(
    updated<&RescaleProblem::tensor>({.shape = "...", .leads = true}), input<&RescaleProblem::scale>());

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

int64_t flops(const Problem& problem) {
  return 8 * problem.logits.element_count();
}
int64_t rescale_flops(const RescaleProblem& problem) {
  return problem.tensor.element_count();
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
  registry::check_options(request, {});
  const TensorView rows = registry::rows_view(request);
  const TensorView factor = contiguous_view(
      nullptr, request.dtype == DType::kFloat64 ? DType::kFloat64 : DType::kFloat32, {1}, request.device);
  return {.tensor = contiguous_view(nullptr, request.dtype, {rows.element_count()}, request.device), .scale = factor};
}

// Shapes that cross_entropy is tested and measured on: the vocabularies of models, odd tails, every option.
std::vector<registry::ProblemRequest> shapes() {
  registry::RequestList add;
  for (DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kFloat16}) {
    for (int64_t columns : {1, 2, 7, 64, 129, 1000, 4096}) add({19, columns}, dtype);
    for (int64_t columns : {32000, 50257, 128256, 262144}) add({3, columns}, dtype);
    add({700, 8}, dtype, {{"ignore_index", "3"}});
    add({70000, 8}, dtype, {{"ignore_index", "3"}, {"weight", "fp32"}});  // so many that they are counted first
    add({0, 128}, dtype);
    add({5, 4096}, dtype, {{"gradient", "0"}});
    add({5, 4096}, dtype, {{"reduction", "none"}});
    add({5, 4096}, dtype, {{"reduction", "sum"}, {"z_loss", "0.001"}});
    add({5, 1000}, dtype, {{"partials", "1"}});
    add({5, 1000}, dtype, {{"partials", "1"}, {"parts", "3"}, {"softcap", "2"}});
    add({40, 30}, dtype, {{"label_smoothing", "0.1"}, {"ignore_index", "2"}});
    add({7, 513}, dtype, {{"weight", "same"}});
    add({7, 512}, dtype, {{"weight", "fp32"}, {"label_smoothing", "0.2"}});
    add({7, 511}, dtype, {{"softcap", "2"}});
    add({2, 65536}, dtype,
        {{"softcap", "3"}, {"z_loss", "0.01"}, {"label_smoothing", "0.1"}, {"weight", "same"}, {"reduction", "mean"}});
    add({2, 65536}, dtype, {{"label_smoothing", "0.1"}, {"z_loss", "0.01"}});
  }
  for (int64_t columns : {1, 5, 1000}) add({11, columns}, DType::kFloat64);
  add({11, 30}, DType::kFloat64, {{"softcap", "2"}, {"weight", "same"}, {"label_smoothing", "0.1"}});
  return std::move(add.all);
}

std::vector<registry::ProblemRequest> rescale_shapes() {
  registry::RequestList add;
  for (DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kFloat16, DType::kFloat64}) {
    for (int64_t columns : {0, 1, 15, 4096, 100003}) add({3, columns}, dtype);
  }
  return std::move(add.all);
}

}  // namespace

constinit const registry::Operation<Problem> kForward = registry::declared<Problem, kProblemFields, flops>(
    {.name = "cross_entropy_forward",
     .kernels = registry::kernel_list<kCudaCluster, kCudaBlock, kCpu, kReference>,
     .filling = filling,
     .make = make_forward,
     .check = check_forward,
     .shrink = shrink,
     .shapes = shapes});
constinit const registry::Operation<Problem> kBackward =
    registry::declared<Problem, kProblemFields, flops>({.name = "cross_entropy_backward",
                                                        .kernels = registry::kernel_list<kCudaBlock, kCpu, kReference>,
                                                        .filling = filling,
                                                        .make = make_backward,
                                                        .check = check_backward,
                                                        .shrink = shrink,
                                                        .shapes = shapes});
constinit const registry::Operation<RescaleProblem> kRescale =
    registry::declared<RescaleProblem, kRescaleProblem, rescale_flops>(
        {.name = "cross_entropy_rescale",
         .kernels = registry::kernel_list<kRescaleCuda, kRescaleCpu, kRescaleReference>,
         .filling = filling,
         .make = make_rescale,
         .check = check_rescale,
         .shapes = rescale_shapes});

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

extern constinit const registry::OpEntry kEntry{.declarations = kDeclarations,
                                                .operations = registry::erased<kForward, kBackward, kRescale>};

}  // namespace kernel_pytorch::cross_entropy
