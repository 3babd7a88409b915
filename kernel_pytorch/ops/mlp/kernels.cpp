// The two ways to compute an MLP: of GEMMs by whatever kernels they choose, and the same of references. What the
// registry asks about its problems.
#include <algorithm>

#include "kernel_pytorch/base/error.h"
#include "kernel_pytorch/ops/mlp/operation.h"
#include "kernel_pytorch/ops/support/composed.h"
#include "kernel_pytorch/registry/any_problem.h"
#include "kernel_pytorch/registry/declared.h"
#include "kernel_pytorch/registry/request_options.h"

namespace kernel_pytorch::mlp {
namespace {

using registry::ProblemRequest;

void describe(const Forward& problem, tuning::KeyBuilder& key) {
  registry::describe_fields(kForwardFields, &problem, key);
  key.field("saved", problem.hidden);
  key.field("preactivation", problem.preactivation);
}

// Both directions: the shape is [rows, in, hidden, out]; options activation=WORD, gated, bias=0|1.
template <class Problem>
Problem make_layers(const ProblemRequest& request, std::string_view op) {
  KP_CHECK(request.shape.size() == 4, op, ": the shape is ", shape_text(request.shape),
           "; it must be [rows, in, hidden, out]");
  const auto view = [&](std::initializer_list<int64_t> sizes) {
    return contiguous_view(nullptr, request.dtype, sizes, request.device);
  };
  const int64_t rows = request.shape[0], in = request.shape[1], hidden = request.shape[2], out = request.shape[3];
  Problem problem;
  problem.activation = static_cast<Activation>(
      registry::choice_option(request, "activation", registry::words_of(linear::kActivationNames), "gelu"));
  problem.gated = registry::flag_option(request, "gated", false);
  const int64_t inner = problem.gated ? 2 * hidden : hidden;
  problem.x = view({rows, in});
  problem.weight_in = view({inner, in});
  problem.weight_out = view({out, hidden});
  problem.hidden = view({rows, hidden});
  problem.preactivation = view({rows, inner});
  if (registry::flag_option(request, "bias", true)) problem.bias_in = view({inner}), problem.bias_out = view({out});
  return problem;
}

// And residual, saved=0|1.
Forward make_forward(const ProblemRequest& request) {
  registry::check_options(request, {"activation", "gated", "bias", "residual", "saved"});
  Forward problem = make_layers<Forward>(request, "mlp_forward");
  problem.output = contiguous_view(nullptr, request.dtype, {request.shape[0], request.shape[3]}, request.device);
  if (registry::flag_option(request, "residual", false)) problem.residual = problem.output;
  if (!registry::flag_option(request, "saved", true)) problem.hidden = problem.preactivation = {};
  return problem;
}

// And first_grad, second_grad=0|1: whether gradients of that layer are wanted.
Backward make_backward(const ProblemRequest& request) {
  registry::check_options(request, {"activation", "gated", "bias", "first_grad", "second_grad"});
  Backward problem = make_layers<Backward>(request, "mlp_backward");
  problem.grad_output = contiguous_view(nullptr, request.dtype, {request.shape[0], request.shape[3]}, request.device);
  if (registry::flag_option(request, "first_grad", true)) {
    problem.grad_x = problem.x, problem.grad_weight_in = problem.weight_in, problem.grad_bias_in = problem.bias_in;
  }
  if (registry::flag_option(request, "second_grad", true)) {
    problem.grad_weight_out = problem.weight_out, problem.grad_bias_out = problem.bias_out;
  }
  return problem;
}

int64_t forward_flops(const Forward& problem) {
  return 2 * problem.x.sizes[0] * (problem.weight_in.element_count() + problem.weight_out.element_count());
}
int64_t backward_flops(const Backward& problem) {
  const int64_t of_in = problem.weight_in.element_count(), of_out = problem.weight_out.element_count();
  const int64_t first = of_in * (problem.grad_x.is_present() + problem.grad_weight_in.is_present());
  const int64_t second = of_out * (problem.grad_weight_out.is_present() + (first > 0));
  return 2 * problem.x.sizes[0] * (first + second);
}

std::vector<ProblemRequest> shapes(const char* half) {
  registry::RequestList add;
  for (DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kFloat16}) {
    add({67, 40, 130, 24}, dtype);
    add({33, 48, 32, 16}, dtype, {{"activation", "silu"}, {"gated", "1"}});
    add({9, 16, 24, 8}, dtype, {{"activation", "identity"}, {"bias", "0"}});
    add({12, 16, 24, 8}, dtype, {{"activation", "relu"}, {half, "0"}});
    add({0, 8, 8, 8}, dtype);
  }
  add({7, 6, 10, 4}, DType::kFloat64);
  return std::move(add.all);
}
std::vector<ProblemRequest> forward_shapes() {
  return shapes("saved");
}
std::vector<ProblemRequest> backward_shapes() {
  return shapes("first_grad");
}

}  // namespace

constinit const registry::Operation<Forward> kForward =
    registry::declared<Forward, kForwardFields, forward_flops>({.name = "mlp_forward",
                                                                .kernels = composed_kernels<Forward, compose>,
                                                                .describe = describe,
                                                                .make = make_forward,
                                                                .check = check,
                                                                .shapes = forward_shapes,
                                                                .parts = parts_of});
constinit const registry::Operation<Backward> kBackward =
    registry::declared<Backward, kBackwardFields, backward_flops>({.name = "mlp_backward",
                                                                   .kernels = composed_kernels<Backward, compose>,
                                                                   .make = make_backward,
                                                                   .check = check,
                                                                   .shapes = backward_shapes,
                                                                   .parts = parts_of});

}  // namespace kernel_pytorch::mlp
