// Linear attention with gates: a state of keys times values for each head, that decays and gathers.
//
//   S_t = diag(e^(gate_t + channel_gate_t + decay)) S_(t-1) + key_t value_t^T       S [columns, values]
//   output_t = scale * query_t^T S_t
//
// No gate: plain linear attention. decay, one for each head: lightning attention, retention. gate, one for each token
// and head: Mamba-2's SSD, simple GLA. channel_gate, one more for each column: GLA. All are logarithms, at most 0 (what
// is above grows, and overflows as the numbers do; -inf forgets the state), and any of them may be there together.
//
// Heads are those of the value. The heads of query and key divide them: head h reads query head h * query_heads /
// heads. A sequence begins with initial_state, zeros where absent, and ends in final_state, so that a sequence may be
// given in segments. With cu_seqlens the batch is 1 and sequence i is tokens cu_seqlens[i] up to cu_seqlens[i + 1];
// tokens in no sequence have output 0 and gradient 0.
//
// With state_index, which only the form that writes in place has, initial_state is a pool [slots, heads, columns,
// values]: sequence i reads and writes slot state_index[i]; -1 is a sequence without a state, which begins with zeros
// and keeps none. Slots that are named twice have an undefined state.
//
// Backward: gradients of every input, from those of output and of final_state. Those of query and key have the heads of
// the value: a front end adds those of a group. Types: query, key, value and output are fp32, bf16, fp16, or fp64 on
// the CPU, all one; gates have that type or fp32; decay and states are fp32 (fp64 for fp64), and so are all sums.
// Exponents are of differences of sums of gates between two tokens of a chunk, never of sums alone, so that a strong
// gate gives 0 and nothing overflows.
#pragma once

#include "kernel_pytorch/base/export.h"
#include "kernel_pytorch/base/fields.h"
#include "kernel_pytorch/device/context.h"

namespace kernel_pytorch::linear_attention {

// How it is computed; the results are the same up to rounding.
enum class Mode : uint8_t { kAuto, kChunk, kRecurrent };
inline constexpr std::string_view kModeNames = "auto chunk recurrent";

inline constexpr std::string_view kQueryShape = "batch tokens query_heads columns";
inline constexpr std::string_view kKeyShape = "batch tokens key_heads columns";
inline constexpr std::string_view kValueShape = "batch tokens heads values";
inline constexpr std::string_view kStateShape = "offsets-1 heads columns values | batch heads columns values";
inline constexpr std::string_view kPoolShape =
    "slots heads columns values | offsets-1 heads columns values | batch heads columns values";

struct Forward {
  TensorView query{}, key{}, value{};  // last stride 1
  TensorView gate{};                   // optional [batch, tokens, heads]
  TensorView channel_gate{};           // optional [batch, tokens, heads, columns], last stride 1
  TensorView decay{};                  // optional [heads], contiguous
  TensorView cu_seqlens{};             // optional: int32 or int64 [sequences + 1], contiguous
  TensorView state_index{};            // optional: int32 or int64 [sequences], contiguous
  TensorView initial_state{};          // optional [sequences or slots, heads, columns, values], contiguous
  double scale = 1;
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
    optional_input<&Forward::gate>({.shape = "batch tokens heads", .content = "positive"}),
    optional_input<&Forward::channel_gate>(
        {.shape = "batch tokens heads columns", .memory = MemoryLayout::kDenseLast, .content = "positive"}),
    optional_input<&Forward::decay>(
        {.shape = "heads", .dtype = "statistic query", .memory = MemoryLayout::kContiguous, .content = "positive"}),
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
    option<&Forward::scale>(), option<&Forward::mode>({.key = KeyPart::kValue, .choices = kModeNames}),
    output<&Forward::output>({.shape = kValueShape, .dtype = "query"}),
    output<&Forward::final_state>({.shape = kPoolShape,
                                   .shape_by = "state_index cu_seqlens",
                                   .dtype = "statistic query",
                                   .wanted = "return_state",
                                   .in_place = "initial_state"}));

struct Backward {
  TensorView grad_output{};  // the value's shape, last stride 1
  TensorView query{}, key{}, value{}, gate{}, channel_gate{}, decay{}, cu_seqlens{}, initial_state{};
  TensorView grad_final_state{};  // optional
  double scale = 1;
  Mode mode = Mode::kAuto;
  TensorView grad_query{}, grad_key{}, grad_value{};  // contiguous, each with the heads of the value
  TensorView grad_gate{}, grad_channel_gate{}, grad_decay{}, grad_initial_state{};  // contiguous; absent: not wanted
};
inline constexpr auto kBackwardFields = fields<Backward>(
    input<&Backward::grad_output>({.shape = kValueShape, .dtype = "query", .memory = MemoryLayout::kDenseLast}),
    input<&Backward::query>(
        {.shape = kQueryShape, .leads = true, .bucketed = "batch tokens", .memory = MemoryLayout::kDenseLast}),
    input<&Backward::key>(
        {.shape = kKeyShape, .dtype = "query", .memory = MemoryLayout::kDenseLast, .key = KeyPart::kSizes}),
    input<&Backward::value>(
        {.shape = kValueShape, .dtype = "query", .memory = MemoryLayout::kDenseLast, .key = KeyPart::kSizes}),
    optional_input<&Backward::gate>({.shape = "batch tokens heads", .content = "positive"}),
    optional_input<&Backward::channel_gate>(
        {.shape = "batch tokens heads columns", .memory = MemoryLayout::kDenseLast, .content = "positive"}),
    optional_input<&Backward::decay>(
        {.shape = "heads", .dtype = "statistic query", .memory = MemoryLayout::kContiguous, .content = "positive"}),
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
    option<&Backward::scale>(), option<&Backward::mode>({.key = KeyPart::kValue, .choices = kModeNames}),
    output<&Backward::grad_query>({.shape = "batch tokens heads columns", .dtype = "query"}),
    output<&Backward::grad_key>({.shape = "batch tokens heads columns", .dtype = "query"}),
    output<&Backward::grad_value>({.shape = kValueShape, .dtype = "query"}),
    output<&Backward::grad_gate>({.shape = "like gate", .dtype = "gate", .wanted = "gate_grad"}),
    output<&Backward::grad_channel_gate>(
        {.shape = "like channel_gate", .dtype = "channel_gate", .wanted = "channel_gate_grad"}),
    output<&Backward::grad_decay>({.shape = "like decay", .dtype = "decay", .wanted = "decay_grad"}),
    output<&Backward::grad_initial_state>(
        {.shape = "like initial_state", .dtype = "initial_state", .wanted = "initial_state_grad"}));

// Throw Error{kInvalidArgument} naming the argument, both values and the cure.
KP_EXPORT void forward(const Forward& arguments, Context& context);
KP_EXPORT void backward(const Backward& arguments, Context& context);

}  // namespace kernel_pytorch::linear_attention
