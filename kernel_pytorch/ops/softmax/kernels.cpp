// The kernels of softmax, best first, the reference last, and how problems of its kind are made and described.
#include <algorithm>

#include "kernel_pytorch/base/error.h"
#include "kernel_pytorch/ops/softmax/operation.h"
#include "kernel_pytorch/ops/softmax/softmax_shapes.h"
#include "kernel_pytorch/registry/request_words.h"

namespace kernel_pytorch::softmax {
namespace {

std::span<const registry::Kernel<ForwardProblem>> forward_kernels() {
  static const registry::Kernel<ForwardProblem> kKernels[] = {kForwardCudaRows, kForwardCudaCluster, kForwardCudaAny,
                                                              kForwardCpu, kForwardReference};
  return kKernels;
}

std::span<const registry::Kernel<BackwardProblem>> backward_kernels() {
  static const registry::Kernel<BackwardProblem> kKernels[] = {kBackwardCudaRows, kBackwardCudaCluster,
                                                               kBackwardCudaAny, kBackwardCpu, kBackwardReference};
  return kKernels;
}

void describe(const ForwardProblem& problem, tuning::KeyBuilder& key) {
  key.field("rows", tuning::bucket(rows_of(problem.x)));
  key.field("columns", columns_of(problem.x));
  key.field("dtype", problem.x.dtype);
  key.field("mask", problem.mask);
  key.field("causal", problem.causal);
  key.field("log", problem.log);
  key.field("dense", problem.x.rank == 2 && problem.x.strides[1] == 1);
}
void describe(const BackwardProblem& problem, tuning::KeyBuilder& key) {
  key.field("rows", tuning::bucket(rows_of(problem.output)));
  key.field("columns", columns_of(problem.output));
  key.field("dtype", problem.output.dtype);
  key.field("masked", problem.masked);
  key.field("log", problem.log);
  key.field("dense", problem.output.rank == 2 && problem.output.strides[1] == 1);
}

using registry::Role;

void visit_tensors(ForwardProblem& problem, registry::TensorVisitor visit, void* state) {
  visit(state, "x", Role::kInput, problem.x);
  if (problem.mask.is_present()) visit(state, "mask", Role::kInput, problem.mask);
  visit(state, "output", Role::kOutput, problem.output);
}
void visit_tensors(BackwardProblem& problem, registry::TensorVisitor visit, void* state) {
  visit(state, "grad_output", Role::kInput, problem.grad_output);
  visit(state, "output", Role::kInput, problem.output);
  visit(state, "grad_input", Role::kOutput, problem.grad_input);
}

void keep_rows(int64_t elements, std::initializer_list<TensorView*> views) {
  const TensorView& first = **views.begin();
  const int64_t rows =
      std::clamp<int64_t>(elements / std::max<int64_t>(columns_of(first), 1), 1, std::max<int64_t>(rows_of(first), 1));
  for (TensorView* view : views) view->sizes[0] = std::min(view->sizes[0], rows);
}

ForwardProblem shrink(const ForwardProblem& problem, int64_t elements) {
  ForwardProblem small = problem;
  if (problem.x.rank == 2 && !problem.mask.is_present()) keep_rows(elements, {&small.x, &small.output});
  return small;
}
BackwardProblem shrink(const BackwardProblem& problem, int64_t elements) {
  BackwardProblem small = problem;
  if (problem.output.rank == 2) keep_rows(elements, {&small.output, &small.grad_output, &small.grad_input});
  return small;
}

// What must move: of a broadcast mask only its own elements, and nothing of the half that causality removes.
registry::Cost cost(const ForwardProblem& problem) {
  const int64_t mask_bytes = problem.mask.is_present() ? span_elements(problem.mask) * size_of(problem.mask.dtype) : 0;
  return {.bytes = 2 * problem.x.byte_count() + mask_bytes, .flops = 5 * problem.x.element_count()};
}
registry::Cost cost(const BackwardProblem& problem) {
  return {.bytes = registry::tensor_bytes(problem, visit_tensors), .flops = 4 * problem.output.element_count()};
}

// [batch, queries, columns] and, for a mask, [queries, columns] that every batch reads.
TensorView make_mask(const registry::ProblemRequest& request, const TensorView& x, int64_t queries, DType dtype) {
  TensorView mask = contiguous_view(nullptr, dtype, {x.sizes[0] / std::max<int64_t>(queries, 1), queries, x.sizes[1]},
                                    request.device);
  mask.strides[0] = 0;
  TensorView* views[] = {&mask};
  merge_leading_dimensions(views);
  return mask;
}

// Options understood: log=0|1, causal=0|1, scale=NUMBER, mask=none|bool|added|fp32. The shape is [..., queries,
// columns].
ForwardProblem make_forward(const registry::ProblemRequest& request) {
  registry::check_options(request, {"log", "causal", "scale", "mask"});
  ForwardProblem problem;
  problem.x = problem.output = registry::rows_view(request);
  problem.scale = registry::number_option(request, "scale", 1);
  problem.causal = registry::flag_option(request, "causal", false);
  problem.log = registry::flag_option(request, "log", false);
  problem.queries = request.shape.size() >= 2 ? request.shape[request.shape.size() - 2] : 1;
  const DType types[] = {DType::kFloat32, DType::kBool, request.dtype, DType::kFloat32};
  const int mask = registry::word_option(request, "mask", {"none", "bool", "added", "fp32"}, "none");
  if (mask != 0) problem.mask = make_mask(request, problem.x, problem.queries, types[mask]);
  return problem;
}

BackwardProblem make_backward(const registry::ProblemRequest& request) {
  const ForwardProblem forward = make_forward(request);
  return {.grad_output = forward.x,
          .output = forward.x,
          .grad_input = forward.x,
          .scale = forward.scale,
          .log = forward.log,
          .masked = forward.removes_scores()};
}

}  // namespace

constinit const registry::Operation<ForwardProblem> kForward{.name = "softmax_forward",
                                                             .kernels = forward_kernels,
                                                             .describe = describe,
                                                             .visit_tensors = visit_tensors,
                                                             .filling = nullptr,
                                                             .make = make_forward,
                                                             .shrink = shrink,
                                                             .cost = cost,
                                                             .shapes = shapes};
constinit const registry::Operation<BackwardProblem> kBackward{.name = "softmax_backward",
                                                               .kernels = backward_kernels,
                                                               .describe = describe,
                                                               .visit_tensors = visit_tensors,
                                                               .filling = nullptr,
                                                               .make = make_backward,
                                                               .shrink = shrink,
                                                               .cost = cost,
                                                               .shapes = shapes};

}  // namespace kernel_pytorch::softmax
