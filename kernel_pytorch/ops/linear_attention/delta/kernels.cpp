// The kernels of the delta rule, best first, the reference last, and what the registry asks about their problems.
#include <cmath>

#include "kernel_pytorch/base/element.h"
#include "kernel_pytorch/ops/linear_attention/delta/operation.h"
#include "kernel_pytorch/registry/declared.h"

namespace kernel_pytorch::linear_attention::delta {
namespace {

constexpr const char* kRequestShape = "batch tokens heads columns";

void scale_elements(const TensorView& view, double factor) {
  for (int64_t i = 0; view.is_present() && i < view.element_count(); ++i) {
    store_element(view.data, view.dtype, i, factor * load_element(view.data, view.dtype, i));
  }
}
// Gates come here positive: made negative, so small that a state lives for some dozens of tokens. Keys of length 1 and
// betas in (0, 1) keep the recurrence stable.
template <class Problem>
void set_trial_inputs(const Problem& on_host) {
  scale_elements(on_host.gate, -0.05);
  scale_elements(on_host.channel_gate, -0.05);
  const TensorView& beta = on_host.beta;
  for (int64_t i = 0; i < beta.element_count(); ++i) {
    const double element = std::abs(load_element(beta.data, beta.dtype, i));
    store_element(beta.data, beta.dtype, i, element / (1 + element));
  }
  if (!on_host.normalize_qk) scale_elements(on_host.key, 1 / std::sqrt(static_cast<double>(on_host.key.sizes[3])));
}

// Sums over many tokens whose terms cancel; states of 16-bit inputs are summed of products rounded to that type.
template <class Problem>
registry::Precision precision(const Problem& problem, std::string_view tensor, DType own) {
  const DType dtype = problem.query.dtype;
  if (dtype == DType::kFloat64) return {.dtype = own};
  const bool is_sum = tensor.find("gate") != std::string_view::npos || tensor == "grad_beta";
  if (dtype == DType::kFloat32) return {.dtype = own, .least_absolute = is_sum ? 4e-5 : 2e-5};
  return {.dtype = dtype, .least_absolute = is_sum ? 0.02 : 0.01};
}

// Of the recurrence: what a chunk adds inside itself depends on how long it is.
int64_t forward_flops(const Forward& problem) {
  const Sizes sizes(problem);
  return 6 * sizes.batch * sizes.tokens * sizes.heads * sizes.columns * sizes.values;
}
int64_t backward_flops(const Backward& problem) {
  const Sizes sizes(problem);
  return 16 * sizes.batch * sizes.tokens * sizes.heads * sizes.columns * sizes.values;
}

// Shapes [batch, tokens, heads, columns] that are tested and measured.
constexpr const char* kForwardShapes = R"(
  fp32 bf16 fp16: 2x150x3x64 1x129x2x128 values=64; gate=1; channel_gate=1; normalize_qk=1 gate=1 beta_dtype=fp32
    1x200x4x64 query_heads=2 key_heads=1 gate=fp32 initial_state=1 values=32
    1x333x2x64 cu_seqlens=int32 offsets=5 initial_state=1 gate=-,1; channel_gate=fp32 gate=1 values=128 normalize_qk=1
    1x70x1x256 gate=1 initial_state=1; 1x70x1x36 values=20 gate=1; channel_gate=1; 2x1x4x128 gate=1 initial_state=1
    1x0x2x64 initial_state=1; 1x65x2x64 mode=recurrent,chunk gate=1; 3x5x2x40 values=24 channel_gate=1 normalize_qk=1
  fp64: 1x20x2x8 gate=1 channel_gate=1 initial_state=1 values=5 normalize_qk=1
)";
constexpr const char* kBackwardShapes = R"(
  fp32 bf16 fp16: 2x150x3x64 1x129x2x128 values=64; gate=1 gate_grad=1; channel_gate=1 channel_gate_grad=1
    1x200x4x64 query_heads=2 key_heads=1 gate=fp32 gate_grad=1 initial_state=1 initial_state_grad=1 values=32 grad_final_state=1
    1x333x2x64 cu_seqlens=int32 offsets=5 initial_state=1 initial_state_grad=1 gate=1 gate_grad=1 grad_final_state=1 normalize_qk=1
    1x333x2x64 channel_gate=fp32 channel_gate_grad=1 gate=1 gate_grad=1 values=128 grad_final_state=1 normalize_qk=1
    1x70x1x256 gate=1 gate_grad=1; 1x70x1x36 values=20 gate=1 gate_grad=1; channel_gate=1 channel_gate_grad=1 normalize_qk=1
    2x1x4x128 gate=1 gate_grad=1; 1x0x2x64; 1x65x2x64 beta_dtype=fp32
    1x1000x1x64 gate=1 gate_grad=1 channel_gate=1 channel_gate_grad=1 initial_state=1 initial_state_grad=1 grad_final_state=1
  fp64: 1x20x2x8 gate=1 gate_grad=1 channel_gate=1 channel_gate_grad=1 initial_state=1 initial_state_grad=1 values=5 normalize_qk=1
)";

}  // namespace

constinit const registry::Operation<Forward> kForward = registry::declared<Forward, kForwardFields, forward_flops>(
    {.name = "delta_rule_forward",
     .kernels = registry::kernel_list<kForwardSm90, kForwardCuda, kForwardCpu, kForwardReference>,
     .precision = precision<Forward>,
     .set_trial_inputs = set_trial_inputs<Forward>,
     .request = {.shape = kRequestShape,
                 .sizes = "values=columns query_heads=heads key_heads=heads offsets=2 slots=batch"},
     .check = registry::check_only<Forward, check>,
     .shapes = kForwardShapes});
constinit const registry::Operation<Backward> kBackward = registry::declared<Backward, kBackwardFields, backward_flops>(
    {.name = "delta_rule_backward",
     .kernels = registry::kernel_list<kBackwardSm90, kBackwardCuda, kBackwardCpu, kBackwardReference>,
     .precision = precision<Backward>,
     .set_trial_inputs = set_trial_inputs<Backward>,
     .request = {.shape = kRequestShape, .sizes = "values=columns query_heads=heads key_heads=heads offsets=2"},
     .check = registry::check_only<Backward, check>,
     .shapes = kBackwardShapes});

}  // namespace kernel_pytorch::linear_attention::delta
