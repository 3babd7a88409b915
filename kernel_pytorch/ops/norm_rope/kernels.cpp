// The kernels of norm_rope, best first, the reference last, and how tests and the tuner make problems.
#include <algorithm>
#include <vector>

#include "kernel_pytorch/base/error.h"
#include "kernel_pytorch/ops/norm_rope/operation.h"
#include "kernel_pytorch/ops/support/composed.h"
#include "kernel_pytorch/registry/declared.h"
#include "kernel_pytorch/registry/request_options.h"

namespace kernel_pytorch::norm_rope {
namespace {

using registry::ProblemRequest;

std::span<const registry::Kernel<Forward>> forward_kernels() {
  static const registry::Kernel<Forward> kKernels[] = {kForwardCuda, composed_kernels<Forward, compose>()[0],
                                                       kForwardReference};
  return kKernels;
}
std::span<const registry::Kernel<Backward>> backward_kernels() {
  static const registry::Kernel<Backward> kKernels[] = {kBackwardCuda, composed_kernels<Backward, compose>()[0],
                                                        kBackwardReference};
  return kKernels;
}

template <class Problem>
void describe(const Problem& problem, tuning::KeyBuilder& key) {
  key.field("tokens", tuning::bucket(problem.x.sizes[0] * problem.x.sizes[sequence_dimension(problem)]));
  key.field("heads", problem.x.sizes[head_dimension(problem)]);
  key.field("head_dim", problem.x.sizes[3]);
  key.field("rotary_dim", problem.rotary_dim);
  key.field("dtype", problem.x.dtype);
  key.field("weight", problem.weight);
  key.field("cos", problem.cos);
}

// The shape is [batch, sequence, heads, head_dim]; options rotary_dim, heads_first, weight=0|1, table=full|half|batch,
// table_dtype, weight_dtype, packed (x is a slice of rows three times as wide).
template <class Problem>
Problem make_common(const ProblemRequest& request) {
  KP_CHECK(request.shape.size() == 4, "shape ", shape_text(request.shape),
           ": norm_rope needs batch, sequence, heads and head_dim, e.g. 2x4096x32x128");
  const int64_t batch = request.shape[0], sequence = request.shape[1], heads = request.shape[2], dim = request.shape[3];
  Problem problem;
  problem.rotary_dim = registry::integer_option(request, "rotary_dim", dim);
  problem.heads_first = registry::flag_option(request, "heads_first", false);
  problem.weight_offset = registry::flag_option(request, "plus_one", false) ? 1 : 0;
  const auto view = [&](DType dtype, std::initializer_list<int64_t> sizes) {
    return contiguous_view(nullptr, dtype, sizes, request.device);
  };
  problem.x = problem.heads_first ? view(request.dtype, {batch, heads, sequence, dim})
                                  : view(request.dtype, {batch, sequence, heads, dim});
  if (registry::flag_option(request, "packed", false)) {
    for (int i = 0; i < 3; ++i) problem.x.strides[i] *= 3;
    problem.x.strides[head_dimension(problem)] = problem.heads_first ? 3 * sequence * dim : dim;
  }
  const DType weight_dtype = registry::dtype_option(request, "weight_dtype", request.dtype);
  if (registry::flag_option(request, "weight", true)) problem.weight = view(weight_dtype, {dim});
  const DType table_dtype = registry::dtype_option(request, "table_dtype", request.dtype);
  const int table = registry::choice_option(request, "table", {"full", "half", "batch"}, "full");
  const int64_t width = table == 1 ? problem.rotary_dim / 2 : problem.rotary_dim;
  problem.cos = table == 2 ? view(table_dtype, {batch, sequence, width}) : view(table_dtype, {sequence + 3, width});
  problem.sin = problem.cos;
  return problem;
}
void check_request(const ProblemRequest& request) {
  registry::check_options(
      request, {"rotary_dim", "heads_first", "plus_one", "packed", "weight", "weight_dtype", "table", "table_dtype"});
}

Forward make_forward(const ProblemRequest& request) {
  check_request(request);
  Forward problem = make_common<Forward>(request);
  problem.output = contiguous_view(nullptr, request.dtype, problem.x.shape(), request.device);
  return problem;
}
Backward make_backward(const ProblemRequest& request) {
  check_request(request);
  Backward problem = make_common<Backward>(request);
  problem.grad_output = problem.grad_x = contiguous_view(nullptr, request.dtype, problem.x.shape(), request.device);
  problem.grad_weight = problem.weight;
  return problem;
}

template <class Problem>
Problem shrink(const Problem& problem, int64_t elements) {
  Problem small = problem;
  const int place = sequence_dimension(problem);
  const int64_t per_token =
      std::max<int64_t>(problem.x.element_count() / std::max<int64_t>(problem.x.sizes[place], 1), 1);
  const int64_t tokens = std::clamp<int64_t>(elements / per_token, 1, std::max<int64_t>(problem.x.sizes[place], 1));
  const auto cut = [&](TensorView& view, int dimension) {
    if (view.is_present()) view.sizes[dimension] = std::min(view.sizes[dimension], tokens);
  };
  cut(small.x, place);
  if constexpr (std::is_same_v<Problem, Forward>) {
    cut(small.output, place);
  } else {
    cut(small.grad_output, place);
    cut(small.grad_x, place);
  }
  for (TensorView* table : {&small.cos, &small.sin}) {
    if (table->rank == 3) cut(*table, 1);
  }
  return small;
}

// Made of both ops it is rounded to x's type in between, whatever the type of a gradient.
template <class Problem>
registry::Precision precision(const Problem& problem, std::string_view, DType) {
  const DType dtype = problem.x.dtype;
  return {.dtype = dtype,
          .least_absolute = dtype == DType::kBFloat16  ? 0x1p-8
                            : dtype == DType::kFloat16 ? 0x1p-11
                                                       : 0};
}

int64_t forward_flops(const Forward& problem) {
  return 8 * problem.x.element_count();
}
int64_t backward_flops(const Backward& problem) {
  return 15 * problem.x.element_count();
}

std::vector<ProblemRequest> shapes() {
  registry::RequestList add;
  for (DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kFloat16, DType::kFloat64}) {
    add({2, 17, 8, 128}, dtype);
    add({1, 33, 5, 64}, dtype, {{"heads_first", "1"}, {"table", "half"}});
    add({2, 9, 6, 80}, dtype, {{"rotary_dim", "32"}, {"plus_one", "1"}});
    add({2, 9, 3, 96}, dtype, {{"packed", "1"}, {"table", "batch"}});
    add({2, 7, 3, 256}, dtype, {{"rotary_dim", "64"}, {"weight", "0"}});
    add({3, 5, 2, 10}, dtype, {{"rotary_dim", "6"}});
    add({1, 300, 32, 128}, dtype, {{"packed", "1"}});
    add({0, 16, 4, 64}, dtype);
    add({2, 0, 4, 64}, dtype);
    if (dtype == DType::kBFloat16 || dtype == DType::kFloat16) {
      add({2, 31, 8, 128}, dtype, {{"table_dtype", "fp32"}, {"weight_dtype", "fp32"}});
    }
  }
  return std::move(add.all);
}

}  // namespace

constinit const registry::Operation<Forward> kForward =
    registry::declared<Forward, kForwardFields, forward_flops>({.name = "norm_rope_forward",
                                                                .kernels = forward_kernels,
                                                                .describe = describe<Forward>,
                                                                .precision = precision<Forward>,
                                                                .make = make_forward,
                                                                .check = check,
                                                                .shrink = shrink<Forward>,
                                                                .shapes = shapes});
constinit const registry::Operation<Backward> kBackward =
    registry::declared<Backward, kBackwardFields, backward_flops>({.name = "norm_rope_backward",
                                                                   .kernels = backward_kernels,
                                                                   .describe = describe<Backward>,
                                                                   .precision = precision<Backward>,
                                                                   .make = make_backward,
                                                                   .check = check,
                                                                   .shrink = shrink<Backward>,
                                                                   .shapes = shapes});

}  // namespace kernel_pytorch::norm_rope
