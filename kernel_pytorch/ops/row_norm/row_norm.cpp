// What both norms share around their kernels: the tuning key, tensors, cost, making of problems.
#include "kernel_pytorch/ops/row_norm/row_norm.h"

#include <algorithm>

#include "kernel_pytorch/base/error.h"
#include "kernel_pytorch/registry/request_words.h"

namespace kernel_pytorch::row_norm {
void describe(const ForwardProblem& problem, tuning::KeyBuilder& key) {
  key.field("rows", tuning::bucket(rows_of(problem.x)));
  key.field("columns", columns_of(problem.x));
  key.field("dtype", problem.x.dtype);
  key.field("weight", problem.weight);
  key.field("bias", problem.bias);
  key.field("residual", problem.residual);
  key.field("output", problem.output);
  key.field("mean", problem.mean);
  key.field("rstd", problem.rstd);
  key.field("dense", problem.x.rank == 2 && problem.x.strides[1] == 1);
}

void describe(const BackwardProblem& problem, tuning::KeyBuilder& key) {
  key.field("rows", tuning::bucket(rows_of(problem.value)));
  key.field("columns", columns_of(problem.value));
  key.field("dtype", problem.value.dtype);
  key.field("weight", problem.weight);
  key.field("grad_output", problem.grad_output);
  key.field("grad_sum", problem.grad_sum);
  key.field("grad_input", problem.grad_input);
  key.field("grad_weight", problem.grad_weight);
  key.field("grad_bias", problem.grad_bias);
  key.field("dense", problem.value.rank == 2 && problem.value.strides[1] == 1);
}

void visit_tensors(ForwardProblem& problem, TensorVisitor visit, void* state) {
  const registry::PresentTensors call{visit, state};
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
  const registry::PresentTensors call{visit, state};
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

registry::Cost cost(const ForwardProblem& problem) {
  return {.bytes = registry::tensor_bytes(problem, visit_tensors), .flops = 5 * problem.x.element_count()};
}
registry::Cost cost(const BackwardProblem& problem) {
  return {.bytes = registry::tensor_bytes(problem, visit_tensors), .flops = 12 * problem.value.element_count()};
}

namespace {

// The words of a request, with defaults.
struct Wanted {
  bool residual, weight, bias, statistics;
  double weight_offset;
  DType weight_dtype, output_dtype, residual_dtype;
};

Wanted parse_options(const registry::ProblemRequest& request, Norm norm) {
  registry::check_options(request, {"residual", "weight", "bias", "weight_dtype", "stats", "weight_offset",
                                    "output_dtype", "residual_dtype"});
  const Wanted wanted{.residual = registry::flag_option(request, "residual", false),
                      .weight = registry::flag_option(request, "weight", true),
                      .bias = registry::flag_option(request, "bias", norm == Norm::kLayer),
                      .statistics = registry::flag_option(request, "stats", true),
                      .weight_offset = registry::number_option(request, "weight_offset", 0),
                      .weight_dtype = registry::dtype_option(request, "weight_dtype", request.dtype),
                      .output_dtype = registry::dtype_option(request, "output_dtype", request.dtype),
                      .residual_dtype = registry::dtype_option(request, "residual_dtype", request.dtype)};
  KP_CHECK(norm == Norm::kLayer || !wanted.bias, "option bias=1: rms_norm has no bias");
  for (DType dtype : {wanted.output_dtype, wanted.residual_dtype}) {
    KP_CHECK(dtype == request.dtype || (request.dtype == DType::kFloat32 && size_of(dtype) == 2), "option ",
             dtype == wanted.output_dtype ? "output_dtype" : "residual_dtype", "=", dtype, " beside ", request.dtype,
             "; it must be that type, or bf16 or fp16 beside fp32");
  }
  return wanted;
}

TensorView of_type(TensorView view, DType dtype) {
  view.dtype = dtype;
  return view;
}

}  // namespace

ForwardProblem make_forward(const registry::ProblemRequest& request, Norm norm) {
  const Wanted wanted = parse_options(request, norm);
  const TensorView full = registry::rows_view(request);
  const TensorView vector = contiguous_view(nullptr, wanted.weight_dtype, {full.sizes[1]}, request.device);
  const DType statistics_dtype = request.dtype == DType::kFloat64 ? DType::kFloat64 : DType::kFloat32;
  const TensorView statistics = contiguous_view(nullptr, statistics_dtype, {full.sizes[0]}, request.device);
  const TensorView absent;
  return {.norm = norm,
          .eps = 1e-5,
          .weight_offset = wanted.weight_offset,
          .x = full,
          .residual = wanted.residual ? of_type(full, wanted.residual_dtype) : absent,
          .weight = wanted.weight ? vector : absent,
          .bias = wanted.bias ? vector : absent,
          .output = of_type(full, wanted.output_dtype),
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
          .grad_output = forward.output,
          .value = forward.x,
          .weight = forward.weight,
          .mean = norm == Norm::kLayer ? statistics : TensorView(),
          .rstd = statistics,
          .grad_sum = forward.sum,
          .grad_input = forward.x,
          .grad_weight = forward.weight,
          .grad_bias = forward.bias};
}

}  // namespace kernel_pytorch::row_norm
