// The delta rule: linear attention whose state is corrected by what it already answers to a key.
//
//   S'  = diag(e^(gate_t + channel_gate_t)) S_(t-1)                    S [columns, values]
//   u_t = beta_t (value_t - S'^T key_t)
//   S_t = S' + key_t u_t^T;   output_t = scale * S_t^T query_t
//
// No gate: DeltaNet. gate, one for each token and head: Gated DeltaNet. channel_gate, one more for each column: KDA.
// Gates are logarithms, at most 0, and -inf forgets the state. With normalize_qk each row of query and key is first
// multiplied by rsqrt(its sum of squares + 1e-6). Keys much longer than 1 make the recurrence grow by itself.
//
// Heads, packed sequences, segments, types and sums are those of linear attention (../linear_attention.h): the heads of
// query and key divide those of the value, gradients of query and key have the heads of the value, tokens in no
// sequence have output 0 and gradient 0. beta has query's type or fp32.
//
// state_index, a pool of states by index, is that of linear attention too.
#pragma once

#include "kernel_pytorch/base/export.h"
#include "kernel_pytorch/base/fields.h"
#include "kernel_pytorch/device/context.h"
#include "kernel_pytorch/ops/linear_attention/linear_attention.h"

namespace kernel_pytorch::linear_attention::delta {

inline constexpr double kNormEpsilon = 1e-6;

struct Forward {
  TensorView query{}, key{}, value{};  // last stride 1
  TensorView beta{};                   // [batch, tokens, heads]
  TensorView gate{};                   // optional [batch, tokens, heads]
  TensorView channel_gate{};           // optional [batch, tokens, heads, columns], last stride 1
  TensorView cu_seqlens{};             // optional: int32 or int64 [sequences + 1], contiguous
  TensorView state_index{};            // optional: int32 or int64 [sequences], contiguous
  TensorView initial_state{};          // optional [sequences or slots, heads, columns, values], contiguous
  double scale = 1;
  bool normalize_qk = false;
  Mode mode = Mode::kAuto;
  TensorView output{};       // the value's shape, contiguous
  TensorView final_state{};  // contiguous; absent: not wanted
};
inline constexpr auto kForwardFields = fields<Forward>(
    input<&Forward::query>(
        {.shape = kQueryShape, .leads = true, .bucketed = "batch tokens", .memory = MemoryLayout::kDenseLast}),
    input<&Forward::key>(
        {.shape = kKeyShape, .dtype = "query", .memory = MemoryLayout::kDenseLast, .key = KeyPart::kSizes}),
    input<&Forward::value>(
        {.shape = kValueShape, .dtype = "query", .memory = MemoryLayout::kDenseLast, .key = KeyPart::kSizes}),
    input<&Forward::beta>({.shape = "batch tokens heads", .content = "positive"}),
    optional_input<&Forward::gate>({.shape = "batch tokens heads", .content = "positive"}),
    optional_input<&Forward::channel_gate>(
        {.shape = "batch tokens heads columns", .memory = MemoryLayout::kDenseLast, .content = "positive"}),
    optional_input<&Forward::cu_seqlens>({.shape = "offsets",
                                          .bucketed = "offsets",
                                          .memory = MemoryLayout::kContiguous,
                                          .key = KeyPart::kSizes,
                                          .content = "offsets query.1"}),
    optional_input<&Forward::state_index>({.memory = MemoryLayout::kContiguous, .content = "indices initial_state.0"}),
    optional_input<&Forward::initial_state>({.shape = kPoolShape,
                                             .shape_by = "state_index cu_seqlens",
                                             .dtype = "statistic query",
                                             .memory = MemoryLayout::kContiguous}),
    option<&Forward::scale>(), option<&Forward::normalize_qk>({.key = KeyPart::kValue}),
    option<&Forward::mode>({.key = KeyPart::kValue, .choices = kModeNames}),
    output<&Forward::output>({.shape = kValueShape, .dtype = "query"}),
    output<&Forward::final_state>({.shape = kPoolShape,
                                   .shape_by = "state_index cu_seqlens",
                                   .dtype = "statistic query",
                                   .wanted = "return_state",
                                   .in_place = "initial_state"}));

struct Backward {
  TensorView grad_output{};  // the value's shape, last stride 1
  TensorView query{}, key{}, value{}, beta{}, gate{}, channel_gate{}, cu_seqlens{}, initial_state{};
  TensorView grad_final_state{};  // optional
  double scale = 1;
  bool normalize_qk = false;
  TensorView grad_query{}, grad_key{}, grad_value{}, grad_beta{};     // contiguous, each with the heads of the value
  TensorView grad_gate{}, grad_channel_gate{}, grad_initial_state{};  // contiguous; absent: not wanted
};
inline constexpr auto kBackwardFields = fields<Backward>(
    input<&Backward::grad_output>({.shape = kValueShape, .dtype = "query", .memory = MemoryLayout::kDenseLast}),
    input<&Backward::query>(
        {.shape = kQueryShape, .leads = true, .bucketed = "batch tokens", .memory = MemoryLayout::kDenseLast}),
    input<&Backward::key>(
        {.shape = kKeyShape, .dtype = "query", .memory = MemoryLayout::kDenseLast, .key = KeyPart::kSizes}),
    input<&Backward::value>(
        {.shape = kValueShape, .dtype = "query", .memory = MemoryLayout::kDenseLast, .key = KeyPart::kSizes}),
    input<&Backward::beta>({.shape = "batch tokens heads", .content = "positive"}),
    optional_input<&Backward::gate>({.shape = "batch tokens heads", .content = "positive"}),
    optional_input<&Backward::channel_gate>(
        {.shape = "batch tokens heads columns", .memory = MemoryLayout::kDenseLast, .content = "positive"}),
    optional_input<&Backward::cu_seqlens>({.shape = "offsets",
                                           .bucketed = "offsets",
                                           .memory = MemoryLayout::kContiguous,
                                           .key = KeyPart::kSizes,
                                           .content = "offsets query.1"}),
    optional_input<&Backward::initial_state>({.shape = kStateShape,
                                              .shape_by = "cu_seqlens",
                                              .dtype = "statistic query",
                                              .memory = MemoryLayout::kContiguous}),
    optional_input<&Backward::grad_final_state>({.shape = kStateShape,
                                                 .shape_by = "cu_seqlens",
                                                 .dtype = "statistic query",
                                                 .memory = MemoryLayout::kContiguous}),
    option<&Backward::scale>(), option<&Backward::normalize_qk>({.key = KeyPart::kValue}),
    output<&Backward::grad_query>({.shape = "batch tokens heads columns", .dtype = "query"}),
    output<&Backward::grad_key>({.shape = "batch tokens heads columns", .dtype = "query"}),
    output<&Backward::grad_value>({.shape = kValueShape, .dtype = "query"}),
    output<&Backward::grad_beta>({.shape = "batch tokens heads", .dtype = "beta"}),
    output<&Backward::grad_gate>({.shape = "like gate", .dtype = "gate", .wanted = "gate_grad"}),
    output<&Backward::grad_channel_gate>(
        {.shape = "like channel_gate", .dtype = "channel_gate", .wanted = "channel_gate_grad"}),
    output<&Backward::grad_initial_state>(
        {.shape = "like initial_state", .dtype = "initial_state", .wanted = "initial_state_grad"}));

// Throw Error{kInvalidArgument} naming the argument, both values and the cure.
KP_EXPORT void forward(const Forward& arguments, Context& context);
KP_EXPORT void backward(const Backward& arguments, Context& context);

}  // namespace kernel_pytorch::linear_attention::delta
