// Problems of attention without a caller: made from words, shrunk, and filled with data that agree with each other, for
// tests, benchmarks and the tuner.
//
// Shape: batch x heads x queries x keys x size, or batch x heads x sequence x size. Words:
//   layout=bhsd|bshd|qkv  key_heads  value_size  scale  causal  causal_offset  window_left  window_right  softcap
//   softcap_after_bias  alibi  sinks  segments  lengths  dropout  lse  grad_lse  deterministic  batch_invariant
//   bias|mask=full|batch|head|query|all (what it is broadcast over)  bias_dtype  grad_bias
//   sequences=N (packed: batch is 1, queries and keys count tokens)  blocks=N (tiles of N x N)
//   first_query  first_key  results=fp32 (of the output and the three gradients)  accumulate (then fp32 too)
//   writes_keys  allow_tf32
//   score_mod|mask_mod=PROGRAM  captured=SIZES (e.g. 4x32,7: fp32 unless captured_dtype says otherwise)
#pragma once

#include <string_view>

#include "kernel_pytorch/ops/attention/operation.h"

namespace kernel_pytorch::attention {

Forward make_forward(const registry::ProblemRequest& request);
Backward make_backward(const registry::ProblemRequest& request);

Forward shrink_forward(const Forward& problem, int64_t elements);
Backward shrink_backward(const Backward& problem, int64_t elements);

registry::Filling fill_scoring(int64_t keys, std::string_view tensor);
// Sequences that fit their bounds, block lists of distinct tiles that are each other's transposed, small slopes.
void settle_scoring(const Sizes& sizes, const Scoring& scoring);
// An lse for which probabilities stay bounded: a backward is compared on any lse, not only on its forward's.
void settle_lse(const Sizes& sizes, double scale, const TensorView& lse);

}  // namespace kernel_pytorch::attention
