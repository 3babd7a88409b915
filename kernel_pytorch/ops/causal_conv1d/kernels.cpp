// The kernels of the causal convolution, best first, the reference last, and what the registry asks about their
// problems.
#include "kernel_pytorch/ops/causal_conv1d/operation.h"
#include "kernel_pytorch/registry/declared.h"
#include "kernel_pytorch/registry/op_entry.h"

namespace kernel_pytorch::causal_conv1d {
namespace {

// The gradient of a weight is a sum over all tokens whose terms cancel.
registry::Precision precision(const Backward& problem, std::string_view tensor, DType own) {
  const bool is_sum = tensor == "grad_weight" || tensor == "grad_bias";
  if (!is_sum || problem.x.dtype == DType::kFloat64) return {.dtype = own};
  return {.dtype = own, .least_absolute = problem.x.dtype == DType::kFloat32 ? 2e-5 : 0.01};
}

int64_t forward_flops(const Forward& problem) {
  return 2 * problem.x.element_count() * problem.weight.sizes[1];
}
int64_t backward_flops(const Backward& problem) {
  return 6 * problem.x.element_count() * problem.weight.sizes[1];
}

// Shapes [batch, tokens, channels] that are tested and measured.
constexpr const char* kForwardShapes = R"(
  fp32 bf16 fp16: 2x50x64 width=2,3,4 bias=1 activation=silu; 1x300x200; 3x1x48 initial_state=1 activation=silu
    2x2x33 width=4 initial_state=1 bias=1; 1x0x16 initial_state=1; 1x70x17 cu_seqlens=int32 offsets=6 initial_state=1
    1x600x40 cu_seqlens=int64 offsets=3 activation=silu
  fp64: 2x9x5 bias=1 initial_state=1 activation=silu
)";
constexpr const char* kBackwardShapes = R"(
  fp32 bf16 fp16: 2x50x64 width=2,3,4 bias=1 bias_grad=1 activation=silu; 1x300x200
    3x1x48 initial_state=1 initial_state_grad=1 activation=silu grad_final_state=1; 1x0x16
    2x2x33 width=4 initial_state=1 initial_state_grad=1 bias=1 bias_grad=1 grad_final_state=1
    1x70x17 cu_seqlens=int32 offsets=6 initial_state=1 initial_state_grad=1 grad_final_state=1 activation=silu
    1x600x40 cu_seqlens=int64 offsets=3 activation=silu
  fp64: 2x9x5 bias=1 bias_grad=1 initial_state=1 initial_state_grad=1 grad_final_state=1 activation=silu
)";

constexpr const char* kRequestShape = "batch tokens channels";
constexpr const char* kRequestSizes = "width=4 offsets=2";

}  // namespace

constinit const registry::Operation<Forward> kForward = registry::declared<Forward, kForwardFields, forward_flops>(
    {.name = "causal_conv1d_forward",
     .kernels = registry::kernel_list<kForwardCuda, kForwardCpu, kForwardReference>,
     .request = {.shape = kRequestShape, .sizes = kRequestSizes},
     .check = registry::check_only<Forward, check>,
     .shapes = kForwardShapes});
constinit const registry::Operation<Backward> kBackward = registry::declared<Backward, kBackwardFields, backward_flops>(
    {.name = "causal_conv1d_backward",
     .kernels = registry::kernel_list<kBackwardCuda, kBackwardCpu, kBackwardReference>,
     .precision = precision,
     .request = {.shape = kRequestShape, .sizes = kRequestSizes},
     .check = registry::check_only<Backward, check>,
     .shapes = kBackwardShapes});

constexpr auto kDeclarations = registry::join(
    registry::differentiable<Forward, forward>("causal_conv1d", "causal_conv1d_forward", kForwardFields),
    registry::plain<Forward, forward>("causal_conv1d_", kForwardFields, {.always = "initial_state", .in_place = true}),
    registry::plain<Backward, backward>("causal_conv1d_backward", kBackwardFields));

extern constinit const registry::OpEntry kEntry{.declarations = kDeclarations,
                                                .operations = registry::erased<kForward, kBackward>};

}  // namespace kernel_pytorch::causal_conv1d
