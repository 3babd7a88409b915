// Attention's arguments as kernels see them, whatever layout a caller has: every tensor is [batch, heads, sequence,
// size] by its strides, whatever broadcasts has strides of 0, numbers that follow from sizes are filled in.
#pragma once

#include <algorithm>
#include <cmath>

#include "kernel_pytorch/ops/attention/attention.h"

namespace kernel_pytorch::attention {

// Which tiles of scores exist, and which of them need no mask: lists of int32, the layout of torch's BlockMask. batch
// and heads may be 1 for all. Full tiles skip mask_mod, which the list sums up; every other condition holds in all
// tiles. Transposed lists ascend. Packed: batch counts sequences, a list has the rows and columns of the longest one,
// tiles count from the beginning of a sequence and ascend in all lists; those past a sequence's end are none.
struct BlockList {
  int64_t query_block = 0, key_block = 0;  // tile size; 0: no list
  TensorView key_counts{}, key_blocks{};   // partial: [batch, heads, query blocks], [batch, heads, query blocks, n]
  TensorView full_key_counts{}, full_key_blocks{};  // optional
  TensorView query_counts{}, query_blocks{};        // transposed, which backward needs: [batch, heads, key blocks(, n)]
  TensorView full_query_counts{}, full_query_blocks{};  // optional

  bool is_present() const { return query_block != 0; }
};

// The options with their meaning filled in:
//   scale          has a value
//   bias, mask     [batch, heads, queries, keys] (packed: [sequences, heads, max_seqlen_q, max_seqlen_k])
//   alibi_slopes   [batch, heads];  query_segment_ids, key_segment_ids  [batch, sequence]
//   max_seqlen     packed: the bound that was given, or all tokens
//   blocks         are in block_list, and empty here
struct Scoring : Options {
  BlockList block_list{};
  int64_t first_query = 0, first_key = 0;

  bool is_packed() const { return cu_seqlens_q.is_present(); }
  bool has_window() const { return window_left >= 0 || window_right >= 0; }
  bool is_part() const { return first_query != 0 || first_key != 0; }
  // causal_offset between places of this call.
  std::optional<int64_t> offset() const {
    if (!causal_offset.has_value()) return {};
    return *causal_offset + first_query - first_key;
  }
};

struct ForwardProblem {
  TensorView query{}, key{}, value{};
  Scoring scoring{};
  TensorView output{};      // [batch, heads, queries, value size]
  TensorView lse{};         // [batch, heads, queries]
  bool accumulate = false;  // output and lse are added to
};

struct BackwardProblem {
  TensorView grad_output{};
  TensorView query{}, key{}, value{};
  TensorView output{}, lse{};
  TensorView grad_lse{};
  Scoring scoring{};
  TensorView grad_query{}, grad_key{}, grad_value{};
  bool accumulate = false;                  // these three, then fp32, are added to
  bool writes_keys = false;                 // accumulate: all but grad_key and grad_value, which hold nothing yet
  TensorView grad_bias{};                   // of the sizes that bias does not broadcast, else 1
  TensorView grad_sinks{};                  // [heads]
  std::vector<TensorView> grad_captured{};  // absent where none is wanted; empty: none wanted

  bool adds_to_keys() const { return accumulate && !writes_keys; }
};

inline double default_scale(int64_t size) {
  return 1 / std::sqrt(static_cast<double>(std::max<int64_t>(size, 1)));
}

// Checks what it needs to know about ranks and broadcasting; check.h has the rest.
ForwardProblem problem_of(const Forward& arguments);
BackwardProblem problem_of(const Backward& arguments);

}  // namespace kernel_pytorch::attention
