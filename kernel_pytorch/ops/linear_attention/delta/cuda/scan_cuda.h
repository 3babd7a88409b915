// What host and device agree on for the delta rule on a GPU. The forward is one scan over tokens; the backward four,
// each of which holds one matrix, gathers and reads it:
//
//   forward          S   token by token as the contract writes it; the backward has its errors W = value - S'^T key
//   gradient         D   of the state, from the last token: D += query grad^T;  dU = D^T key;  D -= key (beta dU)^T;
//                        D *= e^gate
//   reads            S^T again: what dU gives to the key that reads S' (-S' beta dU), and the query's gradient (S grad)
//   writes           D^T again: what the key that is written gets (D beta W)
//
// The last two hold a state turned, since they sum over values what the first two sum over columns.
#pragma once

#include "kernel_pytorch/ops/linear_attention/cuda/scan_cuda.h"

namespace kernel_pytorch::linear_attention::delta {

enum class Scan : int32_t { kForward, kGradient, kReads, kWrites };

struct DeltaArguments {
  ScanTensor query, key, value, beta, gate, channel_gate;
  ScanTensor output;       // of the forward; absent: not wanted
  ScanTensor grad_output;  // of the backward
  // fp32 [batch, tokens, heads, size], of the backward.
  float *errors, *grad_u;                                // of values
  float *grad_query, *grad_key_read, *grad_key_written;  // of columns; gates' terms take the place of grad_query
  float* inverse_norms;                                  // fp32 [batch, tokens, heads, 2]: of query and key
  void *grad_query_out, *grad_key_out, *grad_value_out, *grad_beta_out;
  float* terms;             // [batch, tokens, heads]: the gates' terms summed over columns
  const void* offsets;      // of packed sequences; null: a batch
  const void* state_index;  // null: states lie as sequences do
  const float* initial;
  float* final;
  int64_t tokens, rows, slots;  // rows: batch * tokens * heads
  int32_t heads, columns, values;
  float scale;
  bool offsets_are_wide, index_is_wide, normalizes, beta_is_float, has_vectors;
};

inline constexpr int kWarpColumns = 8;  // of the state that is held, of one warp
inline constexpr int kScanWarps = 4;
inline constexpr int kScanThreads = 32 * kScanWarps;
inline constexpr int kFinishThreads = 256;

}  // namespace kernel_pytorch::linear_attention::delta
