// The two ways to compute a linear layer: of GEMMs by whatever kernels they choose, and the same of references. What
// the registry asks about its problems.
#include <algorithm>

#include "kernel_pytorch/base/error.h"
#include "kernel_pytorch/base/hash.h"
#include "kernel_pytorch/ops/linear/operation.h"
#include "kernel_pytorch/ops/support/composed.h"
#include "kernel_pytorch/registry/any_problem.h"
#include "kernel_pytorch/registry/declared.h"
#include "kernel_pytorch/registry/request_options.h"

namespace kernel_pytorch::linear {
namespace {

using registry::ProblemRequest;

void describe(const Forward& problem, tuning::KeyBuilder& key) {
  registry::describe_fields(kForwardFields, &problem, key);
  key.field("preactivation", problem.preactivation);
  key.field("column_major", is_column_major(problem.weight));
  key.field("up_column_major", problem.weight_up.is_present() && is_column_major(problem.weight_up));
}
void describe(const Backward& problem, tuning::KeyBuilder& key) {
  registry::describe_fields(kBackwardFields, &problem, key);
  key.field("column_major", is_column_major(problem.weight));
}

// Options besides those of the lists: column_major=0|1, of the weight and its gradient; forward: preactivation=0|1.
void turn(TensorView& matrix) {
  if (matrix.is_present()) matrix.strides[0] = 1, matrix.strides[1] = matrix.sizes[0];
}
void arrange(const ProblemRequest& request, Forward& problem) {
  if (registry::flag_option(request, "column_major", false)) turn(problem.weight), turn(problem.weight_up);
  if (!registry::flag_option(request, "preactivation", false)) problem.preactivation = {};
}
void arrange(const ProblemRequest& request, Backward& problem) {
  if (!registry::flag_option(request, "column_major", false)) return;
  turn(problem.weight);
  turn(problem.grad_weight);
}

int64_t forward_flops(const Forward& problem) {
  return 2 * problem.x.sizes[0] * problem.weight.element_count() * (problem.weight_up.is_present() ? 2 : 1);
}
int64_t backward_flops(const Backward& problem) {
  const int64_t gemms = problem.grad_x.is_present() + problem.grad_weight.is_present();
  return 2 * problem.x.sizes[0] * problem.weight.element_count() * gemms;
}

std::vector<ProblemRequest> forward_shapes() {
  registry::RequestList add;
  for (DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kFloat16}) {
    add({67, 130, 40}, dtype);
    add({1, 72, 96}, dtype, {{"bias", "0"}, {"column_major", "1"}});
    add({33, 64, 48}, dtype, {{"activation", "gelu"}, {"residual", "1"}, {"preactivation", "1"}});
    add({33, 64, 48}, dtype, {{"activation", "silu"}, {"gated", "1"}, {"residual", "1"}, {"preactivation", "1"}});
    add({33, 64, 48}, dtype, {{"activation", "silu"}, {"weight_up", "1"}, {"residual", "1"}});
    add({2, 72, 96}, dtype, {{"activation", "gelu"}, {"weight_up", "1"}, {"bias", "0"}});
    add({200, 72, 96}, dtype, {{"activation", "silu"}, {"weight_up", "1"}, {"bias", "0"}, {"column_major", "1"}});
    add({5, 24, 16}, dtype, {{"bias_dtype", "fp32"}});
    add({0, 8, 8}, dtype);
  }
  add({7, 10, 6}, DType::kFloat64, {{"activation", "tanh"}, {"preactivation", "1"}});
  return std::move(add.all);
}

std::vector<ProblemRequest> backward_shapes() {
  registry::RequestList add;
  for (DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kFloat16}) {
    add({67, 130, 40}, dtype);
    add({31, 72, 96}, dtype, {{"column_major", "1"}});
    add({33, 64, 48}, dtype, {{"activation", "gelu"}});
    add({33, 64, 48}, dtype, {{"activation", "silu"}, {"gated", "1"}});
    add({40, 24, 16}, dtype, {{"bias_dtype", "fp32"}, {"weight_dtype", "fp32"}, {"input_grad", "0"}});
    add({40, 24, 16}, dtype, {{"weight_grad", "0"}});
    add({0, 8, 8}, dtype);
  }
  add({7, 10, 6}, DType::kFloat64, {{"activation", "tanh"}});
  return std::move(add.all);
}

}  // namespace

registry::Parts parts_of(const Forward& arguments, const DeviceInfo& device) {
  Forward problem = arguments;
  check(problem, device.device);
  registry::Parts parts;
  if (is_one_product(problem, device)) {
    parts.push_back(matmul::problem_of(product_of(problem), device));
    return parts;
  }
  const GateAndUp products = gate_and_up_of(problem, problem.output, problem.output);
  parts.push_back(matmul::problem_of(products.gate, device));
  parts.push_back(matmul::problem_of(products.up, device));
  return parts;
}

registry::Parts parts_of(const Backward& arguments, const DeviceInfo& device) {
  Backward problem = arguments;
  check(problem, device.device);
  registry::Parts parts;
  const bool is_activated = has_activation(problem.activation, problem.gated);
  const TensorView& grad = is_activated ? problem.preactivation : problem.grad_output;
  if (problem.gated) {
    parts.push_back(matmul::problem_of({.activation = kind_of(problem.activation),
                                        .grad_output = problem.grad_output,
                                        .saved = problem.preactivation,
                                        .grad_input = grad},
                                       device));
  }
  visit_products(problem, grad,
                 [&](const matmul::Product& product) { parts.push_back(matmul::problem_of(product, device)); });
  return parts;
}

constinit const registry::Operation<Forward> kForward = registry::declared<Forward, kForwardFields, forward_flops>(
    {.name = "linear_forward",
     .kernels = composed_kernels<Forward, compose>,
     .describe = describe,
     .request = {.shape = "... out in", .options = "column_major preactivation"},
     .arrange = arrange,
     .check = check,
     .shapes = forward_shapes,
     .parts = parts_of});
constinit const registry::Operation<Backward> kBackward = registry::declared<Backward, kBackwardFields, backward_flops>(
    {.name = "linear_backward",
     .kernels = composed_kernels<Backward, compose>,
     .describe = describe,
     .request = {.shape = "... out in", .options = "column_major"},
     .arrange = arrange,
     .check = check,
     .shapes = backward_shapes,
     .parts = parts_of});

}  // namespace kernel_pytorch::linear
