// Attention problems for tests, benchmarks and the tuner: built from a request's options, shrunk, and filled with
// consistent data.
//
// Shape: batch x heads x queries x keys x size, or batch x heads x sequence x size. Words: the options of
// attention/attention.h that are no tensors, under their names (dropout for dropout_p), and
//   layout=bhsd|bshd|qkv  key_heads  value_size  alibi  sinks  segments  lengths  lse  grad_lse
//   bias|mask=full|batch|head|query|all (what it is broadcast over)  bias_dtype  grad_bias
//   sequences=N (packed: batch is 1, queries and keys count tokens)  blocks=N (tiles of N x N)
//   first_query  first_key  results=fp32 (of the output and the three gradients)  accumulate (then fp32 too)
//   writes_keys  captured=SIZES (e.g. 4x32,7: fp32 unless captured_dtype says otherwise)
#pragma once

#include <string_view>

#include "kernel_pytorch/ops/attention/operation.h"

namespace kernel_pytorch::attention {

inline constexpr Fields kOptions{.all = kOptionFields.fields};

ForwardProblem make_forward(const registry::ProblemRequest& request);
BackwardProblem make_backward(const registry::ProblemRequest& request);

ForwardProblem shrink_forward(const ForwardProblem& problem, int64_t elements);
BackwardProblem shrink_backward(const BackwardProblem& problem, int64_t elements);

registry::Filling fill_scoring(int64_t keys, std::string_view tensor);
// Sequences that fit their bounds, block lists of distinct tiles that are each other's transposed, small slopes.
void set_trial_scoring(const Sizes& sizes, const Scoring& scoring);
// An lse for which probabilities stay bounded: a backward is compared on any lse, not only on its forward's.
void set_trial_lse(const Sizes& sizes, double scale, const TensorView& lse);

}  // namespace kernel_pytorch::attention
