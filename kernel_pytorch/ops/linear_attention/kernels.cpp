// The kernels of linear attention, best first, the reference last, and what the registry asks about their problems.
#include <algorithm>
#include <limits>

#include "kernel_pytorch/base/element.h"
#include "kernel_pytorch/ops/linear_attention/delta/operation.h"
#include "kernel_pytorch/ops/linear_attention/operation.h"
#include "kernel_pytorch/registry/declared.h"
#include "kernel_pytorch/registry/op_entry.h"

namespace kernel_pytorch::linear_attention {
namespace {

constexpr std::string_view kRequestShape = "batch tokens heads columns";

// A trial's gates and decays are positive when they come here: made negative, so small that a state lives for some
// dozens of tokens.
void set_gates(const TensorView& view, double factor) {
  for (int64_t i = 0; view.is_present() && i < view.element_count(); ++i) {
    store_element(view.data, view.dtype, i, -factor * load_element(view.data, view.dtype, i));
  }
}
// Of some tokens gates are strong: nothing of the state may be left, and nothing overflow.
void set_strong_gates(const TensorView& view) {
  if (!view.is_present()) return;
  const int64_t tokens = view.sizes[1], of_token = view.element_count() / std::max<int64_t>(view.sizes[0] * tokens, 1);
  for (int64_t i = 0; i < view.element_count(); ++i) {
    const int64_t token = i / of_token % tokens;
    if (token % 200 == 40) store_element(view.data, view.dtype, i, -30.0 * static_cast<double>(1 + i % 4));
    if (token % 200 == 41) store_element(view.data, view.dtype, i, -std::numeric_limits<double>::infinity());
    if (token % 200 == 110) store_element(view.data, view.dtype, i, -20.0);
  }
}
template <class Problem>
void set_trial_inputs(const Problem& on_host) {
  set_gates(on_host.gate, 0.05);
  set_gates(on_host.channel_gate, 0.05);
  set_strong_gates(on_host.gate);
  set_strong_gates(on_host.channel_gate);
  set_gates(on_host.decay, 0.05);
}

// Sums over many tokens whose terms cancel; states of 16-bit inputs are summed of products rounded to that type.
template <class Problem>
registry::Precision precision(const Problem& problem, std::string_view tensor, DType own) {
  const DType dtype = problem.query.dtype;
  if (dtype == DType::kFloat64) return {.dtype = own};
  const bool is_gate = tensor.find("gate") != std::string_view::npos || tensor == "grad_decay";
  if (dtype == DType::kFloat32) return {.dtype = own, .least_absolute = is_gate ? 4e-5 : 2e-5};
  return {.dtype = dtype, .least_absolute = is_gate ? 0.02 : 0.01};
}

// Of the recurrence: what a chunk adds inside itself depends on how long it is.
int64_t forward_flops(const Forward& problem) {
  const Sizes sizes(problem);
  return 4 * sizes.batch * sizes.tokens * sizes.heads * sizes.columns * sizes.values;
}
int64_t backward_flops(const Backward& problem) {
  const Sizes sizes(problem);
  return 10 * sizes.batch * sizes.tokens * sizes.heads * sizes.columns * sizes.values;
}

// Shapes [batch, tokens, heads, columns] that are tested and measured.
constexpr const char* kForwardShapes = R"(
  fp32 bf16 fp16: 2x150x3x64 1x129x2x128 values=64; decay=1; gate=1; channel_gate=1
    1x200x4x64 query_heads=2 key_heads=1 gate=fp32 initial_state=1 values=32
    1x333x2x64 cu_seqlens=int32 offsets=5 initial_state=1 decay=1 gate=-,1; channel_gate=fp32 gate=1 decay=1 values=128
    1x70x1x256 decay=1 initial_state=1; 1x70x1x36 values=20 gate=1; channel_gate=1; 2x1x4x128 gate=1 initial_state=1
    1x0x2x64 initial_state=1; 1x65x2x64 mode=recurrent,chunk decay=1; 1x2100x1x64 gate=1 channel_gate=1 initial_state=1
  fp64: 1x20x2x8 gate=1 decay=1 channel_gate=1 initial_state=1 values=5
)";
constexpr const char* kBackwardShapes = R"(
  fp32 bf16 fp16: 2x150x3x64 1x129x2x128 values=64; decay=1 decay_grad=1; gate=1 gate_grad=1; channel_gate=1 channel_gate_grad=1
    1x200x4x64 query_heads=2 key_heads=1 gate=fp32 gate_grad=1 initial_state=1 initial_state_grad=1 values=32 grad_final_state=1
    1x333x2x64 cu_seqlens=int32 offsets=5 initial_state=1 initial_state_grad=1 decay=1 decay_grad=1 grad_final_state=1
    1x333x2x64 channel_gate=fp32 channel_gate_grad=1 gate=1 gate_grad=1 decay=1 decay_grad=1 values=128 grad_final_state=1
    1x70x1x256 decay=1 decay_grad=1; 1x70x1x36 values=20 gate=1 gate_grad=1; channel_gate=1 channel_gate_grad=1
    2x1x4x128 gate=1 gate_grad=1; 1x0x2x64; 1x65x2x64 mode=recurrent,chunk decay=1 decay_grad=1
    1x1500x1x64 gate=1 gate_grad=1 channel_gate=1 channel_gate_grad=1 initial_state=1 initial_state_grad=1 grad_final_state=1
  fp64: 1x20x2x8 gate=1 gate_grad=1 decay=1 decay_grad=1 channel_gate=1 channel_gate_grad=1 initial_state=1 initial_state_grad=1 values=5
)";

}  // namespace

constinit const registry::Operation<Forward> kForward = registry::declared<Forward, kForwardFields, forward_flops>(
    {.name = "linear_attention_forward",
     .kernels = registry::kernel_list<kForwardSm90, kForwardSm90Split, kForwardCuda, kForwardCpu, kForwardReference>,
     .precision = precision<Forward>,
     .set_trial_inputs = set_trial_inputs<Forward>,
     .request = {.shape = kRequestShape,
                 .sizes = "values=columns query_heads=heads key_heads=heads offsets=2 slots=batch"},
     .check = registry::check_only<Forward, check>,
     .shapes = kForwardShapes});
constinit const registry::Operation<Backward> kBackward = registry::declared<Backward, kBackwardFields, backward_flops>(
    {.name = "linear_attention_backward",
     // kBackwardSm90Split read from a misaligned address on an H200; mended, and not run there since (NOTES.md).
     .kernels =
         registry::kernel_list<kBackwardSm90, kBackwardCuda, kBackwardSm90Split, kBackwardCpu, kBackwardReference>,
     .precision = precision<Backward>,
     .set_trial_inputs = set_trial_inputs<Backward>,
     .request = {.shape = kRequestShape, .sizes = "values=columns query_heads=heads key_heads=heads offsets=2"},
     .check = registry::check_only<Backward, check>,
     .shapes = kBackwardShapes});

constexpr auto kDeclarations =
    registry::join(registry::differentiable<Forward, forward>("linear_attention", "linear_attention_forward",
                                                              kForwardFields, {.never = "state_index"}),
                   registry::plain<Forward, forward>("linear_attention_", kForwardFields,
                                                     {.always = "initial_state", .in_place = true}),
                   registry::plain<Backward, backward>("linear_attention_backward", kBackwardFields),
                   registry::differentiable<delta::Forward, delta::forward>(
                       "delta_rule", "delta_rule_forward", delta::kForwardFields, {.never = "state_index"}),
                   registry::plain<delta::Forward, delta::forward>("delta_rule_", delta::kForwardFields,
                                                                   {.always = "initial_state", .in_place = true}),
                   registry::plain<delta::Backward, delta::backward>("delta_rule_backward", delta::kBackwardFields));

extern constinit const registry::OpEntry kEntry{
    .declarations = kDeclarations,
    .operations = registry::erased<kForward, kBackward, delta::kForward, delta::kBackward>};

}  // namespace kernel_pytorch::linear_attention
