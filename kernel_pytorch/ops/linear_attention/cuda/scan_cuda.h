// What host and device agree on for scans: the recurrence of linear attention in either direction, which is the forward
// and, with other tensors in its places, each of the gradients.
//
//   forwards   S <- e^g_t S + key_t value_t^T,  output_t = query_t^T S       for t = first to last
//   backwards  S <- S + key_t value_t^T,  output_t = query_t^T S,  S <- e^g_t S     for t = last to first
#pragma once

#include "kernel_pytorch/base/fixed_width.h"

namespace kernel_pytorch::linear_attention {

struct ScanTensor {
  void* data;  // null: absent
  int64_t batch_stride, token_stride, head_stride;
  int32_t group;  // heads of the scan that share one of its heads
  bool is_float;  // of gates: else of the element type
};

struct ScanArguments {
  ScanTensor query, key, value, output, gate, channel_gate;
  const float* decay;       // of each head; null: none
  const void* offsets;      // of packed sequences; null: a batch
  const void* state_index;  // of the steps' kernel alone; null: states lie as sequences do
  const float* initial;
  float* final;
  int64_t tokens, slots;
  int32_t heads, columns, values;  // of the state
  float query_scale, key_scale;
  bool offsets_are_wide, index_is_wide, backwards;
  bool gates_values;                        // channel gates are of the state's values, else of its columns
  bool initial_is_turned, final_is_turned;  // stored [values, columns]
};

inline constexpr int kStepWarps = 8;
inline constexpr int kStepThreads = 32 * kStepWarps;

// The gates' gradients: that of the gate of token t is the sum over t and all later tokens of q dq - k dk, and of the
// final state times its gradient.
struct GateArguments {
  ScanTensor query, key;  // grouped
  float* grad_query;      // fp32 [batch, tokens, heads, columns]; the terms take its place
  const float* grad_key;  // likewise
  void *grad_query_out, *grad_key_out;
  float* terms;                                 // [batch, tokens, heads]: q dq - k dk summed over columns
  void *grad_gate, *grad_channel_gate;          // null: not wanted
  float* decay_sums;                            // [sequences, heads]: of the gradients of all gates
  const float *final_state, *grad_final_state;  // null: no such gradient
  const void* offsets;
  int64_t tokens, rows;  // batch * tokens * heads
  int32_t heads, columns, values;
  bool offsets_are_wide, gate_is_float, channel_gate_is_float, final_is_turned, has_initial;
};
inline constexpr int kGateThreads = 256;
inline constexpr int kGateColumns = 32;  // that a block sums gates of

}  // namespace kernel_pytorch::linear_attention
