// The kernels of softmax, best first, the reference last, and how problems of its kind are made.
#include <algorithm>
#include <vector>

#include "kernel_pytorch/base/error.h"
#include "kernel_pytorch/ops/softmax/operation.h"
#include "kernel_pytorch/registry/declared.h"
#include "kernel_pytorch/registry/op_entry.h"
#include "kernel_pytorch/registry/request_options.h"

namespace kernel_pytorch::softmax {
namespace {

// A mask has rows of its own.
ForwardProblem shrink_forward(const ForwardProblem& problem, int64_t elements) {
  ForwardProblem small = problem;
  if (!problem.mask.is_present()) registry::shrink_fields(kForwardFields, &small, elements);
  return small;
}

// What must move: of a broadcast mask only its own elements, and nothing of the half that causality removes.
registry::Cost forward_cost(const ForwardProblem& problem) {
  const int64_t mask_bytes = problem.mask.is_present() ? span_elements(problem.mask) * size_of(problem.mask.dtype) : 0;
  return {.bytes = 2 * problem.x.byte_count() + mask_bytes, .flops = 5 * problem.x.element_count()};
}
int64_t backward_flops(const BackwardProblem& problem) {
  return 4 * problem.output.element_count();
}

// [..., queries, columns] as the request gives it, of both directions.
TensorView make_x(const registry::ProblemRequest& request) {
  KP_CHECK(!request.shape.empty(), "softmax: the shape is empty; it must be [..., queries, columns]");
  return contiguous_view(nullptr, request.dtype, request.shape, request.device);
}

// Options understood: log=0|1, causal=0|1, scale=NUMBER, mask=none|bool|added|fp32: one [queries, columns] for all.
ForwardProblem make_forward(const registry::ProblemRequest& request) {
  registry::check_options(request, {"log", "causal", "scale", "mask"});
  ForwardProblem problem;
  registry::make_options(kForwardFields, request, &problem);
  problem.x = problem.output = make_x(request);
  const DType types[] = {DType::kFloat32, DType::kBool, request.dtype, DType::kFloat32};
  const int mask = registry::choice_option(request, "mask", {"none", "bool", "added", "fp32"}, "none");
  if (mask == 0) return problem;
  problem.mask = contiguous_view(nullptr, types[mask], request.shape, request.device);
  for (int i = 0; i + 2 < problem.mask.rank; ++i) problem.mask.strides[static_cast<size_t>(i)] = 0;
  return problem;
}

BackwardProblem make_backward(const registry::ProblemRequest& request) {
  const ForwardProblem forward = make_forward(request);
  return {.grad_output = forward.x,
          .output = forward.x,
          .scale = forward.scale,
          .log = forward.log,
          .masked = removes_scores(forward),
          .grad_input = forward.x};
}

// Shapes that softmax is tested and measured on: the edges of every kernel's range, odd tails, the options.
std::vector<registry::ProblemRequest> shapes() {
  registry::RequestList add;
  for (DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kFloat16}) {
    for (int64_t columns : {1, 2, 7, 8, 33, 64, 127, 128, 520, 1000, 1024, 2048}) add({19, columns}, dtype);
    for (int64_t columns : {4096, 8192, 16384, 32768}) add({5, columns}, dtype);
    for (int64_t columns : {65536, 100001, 131072, 262144}) add({2, columns}, dtype);
    add({700, 256}, dtype, {{"log", "1"}});
    add({0, 128}, dtype);
    add({5, 4096}, dtype, {{"log", "1"}, {"scale", "-0.5"}});
    add({2, 65536}, dtype, {{"log", "1"}});
    add({3, 40, 72}, dtype, {{"causal", "1"}, {"scale", "0.125"}});
    add({3, 72, 40}, dtype, {{"causal", "1"}});
    add({2, 9, 1030}, dtype, {{"causal", "1"}, {"mask", "bool"}, {"log", "1"}});
    for (const char* mask : {"bool", "added", "fp32"}) {
      add({3, 6, 256}, dtype, {{"mask", mask}});
      add({2, 3, 4096}, dtype, {{"mask", mask}, {"causal", "1"}});
      add({2, 2, 65536}, dtype, {{"mask", mask}});
      add({3, 6, 333}, dtype, {{"mask", mask}});
    }
  }
  for (int64_t columns : {1, 5, 1000}) add({11, columns}, DType::kFloat64);
  add({2, 11, 30}, DType::kFloat64, {{"causal", "1"}, {"mask", "added"}});
  return std::move(add.all);
}

}  // namespace

constinit const registry::Operation<ForwardProblem> kForward = registry::declared<ForwardProblem, kForwardFields>(
    {.name = "softmax_forward",
     .kernels =
         registry::kernel_list<kForwardCudaRows, kForwardCudaCluster, kForwardCudaAny, kForwardCpu, kForwardReference>,
     .make = make_forward,
     .check = check,
     .shrink = shrink_forward,
     .cost = forward_cost,
     .shapes = shapes});
constinit const registry::Operation<BackwardProblem> kBackward =
    registry::declared<BackwardProblem, kBackwardFields, backward_flops>(
        {.name = "softmax_backward",
         .kernels = registry::kernel_list<kBackwardCudaRows, kBackwardCudaCluster, kBackwardCudaAny, kBackwardCpu,
                                          kBackwardReference>,
         .make = make_backward,
         .check = check,
         .shapes = shapes});

constexpr auto kDeclarations =
    registry::join(registry::differentiable<Forward, forward>("softmax", "softmax_forward", kForwardFields),
                   registry::plain<Forward, forward>("softmax_", kForwardFields, {.in_place = true}),
                   registry::plain<Backward, backward>("softmax_backward", kBackwardFields));

extern constinit const registry::OpEntry kEntry{.declarations = kDeclarations,
                                                .operations = registry::erased<kForward, kBackward>};

}  // namespace kernel_pytorch::softmax
