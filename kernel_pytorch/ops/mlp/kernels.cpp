// The two ways to compute an MLP: of GEMMs by whatever kernels they choose, and the same of references. What the
// registry asks about its problems.
#include "kernel_pytorch/ops/mlp/operation.h"
#include "kernel_pytorch/ops/support/composed.h"
#include "kernel_pytorch/registry/any_problem.h"
#include "kernel_pytorch/registry/declared.h"

namespace kernel_pytorch::mlp {
namespace {

void describe(const Forward& problem, tuning::KeyBuilder& key) {
  key.field("saved", problem.hidden);
  key.field("preactivation", problem.preactivation);
}

// hidden: of the second layer; the first has twice as many where it is gated.
constexpr registry::RequestForm kRequest{.shape = "... in hidden out", .sizes = "inner=hidden?gated"};

int64_t forward_flops(const Forward& problem) {
  return 2 * problem.x.sizes[0] * (problem.weight_in.element_count() + problem.weight_out.element_count());
}
int64_t backward_flops(const Backward& problem) {
  const int64_t of_in = problem.weight_in.element_count(), of_out = problem.weight_out.element_count();
  const int64_t first = of_in * (problem.grad_x.is_present() + problem.grad_weight_in.is_present());
  const int64_t second = of_out * (problem.grad_weight_out.is_present() + (first > 0));
  return 2 * problem.x.sizes[0] * (first + second);
}

constexpr const char* kForwardShapes = R"(
  fp32 bf16 fp16: 67x40x130x24 0x8x8x8; 33x48x32x16 activation=silu gated=1; 9x16x24x8 activation=identity bias=0
    12x16x24x8 activation=relu saved=0
  fp64: 7x6x10x4
)";
constexpr const char* kBackwardShapes = R"(
  fp32 bf16 fp16: 67x40x130x24 0x8x8x8; 33x48x32x16 activation=silu gated=1; 9x16x24x8 activation=identity bias=0
    12x16x24x8 activation=relu input_grad+weight_in_grad+bias_in_grad=0
  fp64: 7x6x10x4
)";

}  // namespace

constinit const registry::Operation<Forward> kForward =
    registry::declared<Forward, kForwardFields, forward_flops>({.name = "mlp_forward",
                                                                .kernels = composed_kernels<Forward, compose, true>,
                                                                .describe = describe,
                                                                .request = kRequest,
                                                                .check = check,
                                                                .shapes = kForwardShapes,
                                                                .parts = parts_of});
constinit const registry::Operation<Backward> kBackward =
    registry::declared<Backward, kBackwardFields, backward_flops>({.name = "mlp_backward",
                                                                   .kernels = composed_kernels<Backward, compose, true>,
                                                                   .request = kRequest,
                                                                   .check = check,
                                                                   .shapes = kBackwardShapes,
                                                                   .parts = parts_of});

}  // namespace kernel_pytorch::mlp
