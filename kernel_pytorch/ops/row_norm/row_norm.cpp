// What both norms share around their kernels: merging of dimensions, the tuning key, tensors, cost, making of problems.
#include "kernel_pytorch/ops/row_norm/row_norm.h"

#include <algorithm>
#include <charconv>
#include <cmath>

#include "kernel_pytorch/base/error.h"

namespace kernel_pytorch::row_norm {
namespace {

bool can_merge(std::span<TensorView*> views, int outer) {
  return std::ranges::all_of(views, [&](const TensorView* view) {
    return !view->is_present() || view->strides[outer] == view->sizes[outer + 1] * view->strides[outer + 1];
  });
}

void remove_dimension(TensorView& view, int dimension) {
  for (int i = dimension; i + 1 < view.rank; ++i) {
    view.sizes[i] = view.sizes[i + 1];
    view.strides[i] = view.strides[i + 1];
  }
  --view.rank;
}

void for_present(std::span<TensorView*> views, auto&& change) {
  for (TensorView* view : views) {
    if (view->is_present()) change(*view);
  }
}

}  // namespace

void merge_leading_dimensions(std::span<TensorView*> views) {
  TensorView& first = *views.front();
  if (first.rank == 1) {  // a lone row
    for_present(views, [](TensorView& view) {
      view.rank = 2;
      view.sizes[1] = view.sizes[0];
      view.strides[1] = view.strides[0];
      view.sizes[0] = 1;
      view.strides[0] = view.sizes[1] * view.strides[1];
    });
    return;
  }
  if (first.rank == 2) return;
  if (first.element_count() == 0) {  // strides mean nothing
    const int64_t rows = rows_of(first), columns = columns_of(first);
    for_present(views, [&](TensorView& view) {
      view = contiguous_view(view.data, view.dtype, {rows, columns}, view.device);
    });
    return;
  }
  for (int i = first.rank - 2; i >= 0 && first.rank > 2; --i) {
    if (first.sizes[i] == 1) for_present(views, [&](TensorView& view) { remove_dimension(view, i); });
  }
  for (int i = first.rank - 3; i >= 0; --i) {
    if (!can_merge(views, i)) continue;
    for_present(views, [&](TensorView& view) {
      view.sizes[i + 1] *= view.sizes[i];
      remove_dimension(view, i);
    });
  }
}

void describe(const ForwardProblem& problem, tuning::KeyBuilder& key) {
  key.field("rows", tuning::bucket(rows_of(problem.x)));
  key.field("columns", columns_of(problem.x));
  key.field("dtype", problem.x.dtype);
  key.field("weight_dtype", problem.weight.is_present() ? problem.weight.dtype : problem.x.dtype);
  key.field("residual", problem.residual.is_present());
  key.field("dense", problem.x.rank == 2 && problem.x.strides[1] == 1);
}

void describe(const BackwardProblem& problem, tuning::KeyBuilder& key) {
  key.field("rows", tuning::bucket(rows_of(problem.value)));
  key.field("columns", columns_of(problem.value));
  key.field("dtype", problem.value.dtype);
  key.field("weight_dtype", problem.weight.is_present() ? problem.weight.dtype : problem.value.dtype);
  key.field("grad_sum", problem.grad_sum.is_present());
  key.field("grad_weight", problem.grad_weight.is_present());
  key.field("dense", problem.value.rank == 2 && problem.value.strides[1] == 1);
}

void visit_tensors(ForwardProblem& problem, TensorVisitor visit, void* state) {
  const auto call = [&](std::string_view name, registry::Role role, TensorView& view) {
    if (view.is_present()) visit(state, name, role, view);
  };
  using enum registry::Role;
  call("x", kInput, problem.x);
  call("residual", kInput, problem.residual);
  call("weight", kInput, problem.weight);
  call("bias", kInput, problem.bias);
  call("output", kOutput, problem.output);
  call("sum", kOutput, problem.sum);
  call("mean", kOutput, problem.mean);
  call("rstd", kOutput, problem.rstd);
}

void visit_tensors(BackwardProblem& problem, TensorVisitor visit, void* state) {
  const auto call = [&](std::string_view name, registry::Role role, TensorView& view) {
    if (view.is_present()) visit(state, name, role, view);
  };
  using enum registry::Role;
  call("grad_output", kInput, problem.grad_output);
  call("value", kInput, problem.value);
  call("weight", kInput, problem.weight);
  call("mean", kInput, problem.mean);
  call("rstd", kInput, problem.rstd);
  call("grad_sum", kInput, problem.grad_sum);
  call("grad_input", kOutput, problem.grad_input);
  call("grad_weight", kOutput, problem.grad_weight);
  call("grad_bias", kOutput, problem.grad_bias);
}

namespace {

// Keeps the first rows of a [rows, columns] or [rows] view.
void keep_rows(TensorView& view, int64_t rows) {
  if (view.is_present()) view.sizes[0] = std::min(view.sizes[0], rows);
}

int64_t rows_within(const TensorView& view, int64_t elements) {
  return std::clamp<int64_t>(elements / std::max<int64_t>(columns_of(view), 1), 1, std::max<int64_t>(rows_of(view), 1));
}

}  // namespace

ForwardProblem shrink(const ForwardProblem& problem, int64_t elements) {
  ForwardProblem small = problem;
  if (problem.x.rank != 2) return small;
  const int64_t rows = rows_within(problem.x, elements);
  for (TensorView* view : {&small.x, &small.residual, &small.output, &small.sum, &small.mean, &small.rstd}) {
    keep_rows(*view, rows);
  }
  return small;
}

BackwardProblem shrink(const BackwardProblem& problem, int64_t elements) {
  BackwardProblem small = problem;
  if (problem.value.rank != 2) return small;
  const int64_t rows = rows_within(problem.value, elements);
  for (TensorView* view :
       {&small.grad_output, &small.value, &small.mean, &small.rstd, &small.grad_sum, &small.grad_input}) {
    keep_rows(*view, rows);
  }
  return small;
}

namespace {

template <class Problem>
registry::Cost cost_of(const Problem& problem, int64_t elements, int64_t flops_per_element) {
  registry::Cost cost{.flops = elements * flops_per_element};
  Problem copy = problem;
  visit_tensors(
      copy,
      [](void* state, std::string_view, registry::Role, TensorView& view) {
        *static_cast<int64_t*>(state) += view.byte_count();
      },
      &cost.bytes);
  return cost;
}

}  // namespace

registry::Cost cost(const ForwardProblem& problem) {
  return cost_of(problem, problem.x.element_count(), 5);
}
registry::Cost cost(const BackwardProblem& problem) {
  return cost_of(problem, problem.value.element_count(), 12);
}

namespace {

// The words of a request, with defaults.
struct Wanted {
  bool residual = false, weight = true, bias = false, statistics = true;
  double weight_offset = 0;
  DType weight_dtype;
};

double parse_number(const std::string& name, const std::string& text) {
  double number = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  KP_CHECK(error == std::errc() && end == text.data() + text.size() && std::isfinite(number), "option ", name, "=",
           text, ": a number is needed");
  return number;
}

Wanted parse_options(const registry::ProblemRequest& request, Norm norm) {
  Wanted wanted{.bias = norm == Norm::kLayer, .weight_dtype = request.dtype};
  for (const auto& [name, text] : request.options) {
    if (name == "weight_dtype") {
      const auto dtype = parse_dtype(text);
      KP_CHECK(dtype.has_value(), "option weight_dtype=", text, ": unknown; use fp32 or ", request.dtype);
      wanted.weight_dtype = *dtype;
      continue;
    }
    const double number = parse_number(name, text);
    if (name == "residual")
      wanted.residual = number != 0;
    else if (name == "weight")
      wanted.weight = number != 0;
    else if (name == "bias")
      wanted.bias = number != 0;
    else if (name == "stats")
      wanted.statistics = number != 0;
    else if (name == "weight_offset")
      wanted.weight_offset = number;
    else
      fail(ErrorCode::kInvalidArgument, "option ", name,
           ": unknown; known are residual, weight, bias, weight_dtype, stats, weight_offset");
  }
  KP_CHECK(norm == Norm::kLayer || !wanted.bias, "option bias=1: rms_norm has no bias");
  return wanted;
}

TensorView view_of(const registry::ProblemRequest& request) {
  KP_CHECK(!request.shape.empty(), "shape is empty; give rows and columns, e.g. 1024x4096");
  int64_t rows = 1;
  for (size_t i = 0; i + 1 < request.shape.size(); ++i) rows *= request.shape[i];
  KP_CHECK(rows >= 0 && request.shape.back() >= 0, "shape ", shape_text(request.shape), ": sizes cannot be negative");
  return contiguous_view(nullptr, request.dtype, {rows, request.shape.back()}, request.device);
}

}  // namespace

ForwardProblem make_forward(const registry::ProblemRequest& request, Norm norm) {
  const Wanted wanted = parse_options(request, norm);
  const TensorView full = view_of(request);
  const TensorView vector = contiguous_view(nullptr, wanted.weight_dtype, {full.sizes[1]}, request.device);
  const DType statistics_dtype = request.dtype == DType::kFloat64 ? DType::kFloat64 : DType::kFloat32;
  const TensorView statistics = contiguous_view(nullptr, statistics_dtype, {full.sizes[0]}, request.device);
  const TensorView absent;
  return {.norm = norm,
          .eps = 1e-5,
          .weight_offset = wanted.weight_offset,
          .x = full,
          .residual = wanted.residual ? full : absent,
          .weight = wanted.weight ? vector : absent,
          .bias = wanted.bias ? vector : absent,
          .output = full,
          .sum = wanted.residual ? full : absent,
          .mean = wanted.statistics && norm == Norm::kLayer ? statistics : absent,
          .rstd = wanted.statistics ? statistics : absent};
}

BackwardProblem make_backward(const registry::ProblemRequest& request, Norm norm) {
  const ForwardProblem forward = make_forward(request, norm);
  const TensorView statistics =
      contiguous_view(nullptr, request.dtype == DType::kFloat64 ? DType::kFloat64 : DType::kFloat32,
                      {forward.x.sizes[0]}, request.device);
  return {.norm = norm,
          .weight_offset = forward.weight_offset,
          .grad_output = forward.x,
          .value = forward.x,
          .weight = forward.weight,
          .mean = norm == Norm::kLayer ? statistics : TensorView(),
          .rstd = statistics,
          .grad_sum = forward.residual,
          .grad_input = forward.x,
          .grad_weight = forward.weight,
          .grad_bias = forward.bias};
}

}  // namespace kernel_pytorch::row_norm
