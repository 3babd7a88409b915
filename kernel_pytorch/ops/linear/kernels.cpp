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
  key.field("preactivation", problem.preactivation);
  key.field("column_major", is_column_major(problem.weight));
  key.field("up_column_major", problem.weight_up.is_present() && is_column_major(problem.weight_up));
}
void describe(const Backward& problem, tuning::KeyBuilder& key) {
  key.field("column_major", is_column_major(problem.weight));
}

// Options besides those of the lists: column_major=0|1, of the weight and its gradient; forward: preactivation=0|1.
void arrange(const ProblemRequest& request, Forward& problem) {
  const bool is_turned = registry::flag_option(request, "column_major", false);
  for (TensorView* weight : {&problem.weight, &problem.weight_up}) registry::store_matrices(*weight, 0, is_turned);
  if (!registry::flag_option(request, "preactivation", false)) problem.preactivation = {};
}
void arrange(const ProblemRequest& request, Backward& problem) {
  const bool is_turned = registry::flag_option(request, "column_major", false);
  for (TensorView* weight : {&problem.weight, &problem.grad_weight}) registry::store_matrices(*weight, 0, is_turned);
}

int64_t forward_flops(const Forward& problem) {
  return 2 * problem.x.sizes[0] * problem.weight.element_count() * (problem.weight_up.is_present() ? 2 : 1);
}
int64_t backward_flops(const Backward& problem) {
  const int64_t gemms = problem.grad_x.is_present() + problem.grad_weight.is_present();
  return 2 * problem.x.sizes[0] * problem.weight.element_count() * gemms;
}

constexpr const char* kForwardShapes = R"(
    fp32 bf16 fp16: 67x130x40 0x8x8; 1x72x96 bias=0 column_major=1; 33x64x48 activation=gelu residual=1 preactivation=1
    activation=silu gated=1 residual=1 preactivation=1; activation=silu weight_up=1 residual=1
    2x72x96 activation=gelu weight_up=1 bias=0; 200x72x96 activation=silu weight_up=1 bias=0 column_major=1
    5x24x16 bias_dtype=fp32; fp32: 33x64x48 precision=bf16x3,bf16 activation=gelu
    fp64: 7x10x6 activation=tanh preactivation=1; 7x10x6 activation=silu weight_up=1
)";

constexpr const char* kBackwardShapes = R"(
    fp32 bf16 fp16: 67x130x40 0x8x8; 31x72x96 column_major=1; 33x64x48 activation=gelu; activation=silu gated=1
    40x24x16 bias_dtype=fp32 weight_dtype=fp32 input_grad=0; weight_grad=0; fp32: 33x64x48 precision=bf16x3,bf16
    fp64: 7x10x6 activation=tanh
)";

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
     .kernels = composed_kernels<Forward, compose, true>,
     .describe = describe,
     .request = {.shape = "... out in", .options = "column_major preactivation"},
     .arrange = arrange,
     .check = check,
     .shapes = kForwardShapes,
     .parts = parts_of});
constinit const registry::Operation<Backward> kBackward = registry::declared<Backward, kBackwardFields, backward_flops>(
    {.name = "linear_backward",
     .kernels = composed_kernels<Backward, compose, true>,
     .describe = describe,
     .request = {.shape = "... out in", .options = "column_major"},
     .arrange = arrange,
     .check = check,
     .shapes = kBackwardShapes,
     .parts = parts_of});

}  // namespace kernel_pytorch::linear
