// Attention, exact, with whatever may stand between its two products, forward and backward.
//
//   score(q, k)  = scale * dot(query[q], key[k]);  softcap c > 0: score = c * tanh(score / c);
//                  score += bias;  score -= slope * |k - q - offset| (ALiBi);  score = score_mod(score, batch, head, q,
//                  k)
//                  (`softcap_after_bias` caps after bias and ALiBi instead)
//   kept(q, k)   = every condition given holds: causal, window, key length, segments, mask, blocks, mask_mod
//   lse(q)       = log(sum over kept k of exp(score) + exp(sink of the head))          natural logarithm
//   output[q]    = sum over kept k of drop(exp(score - lse)) * value[k]
//
// Shapes: query [batch, heads, queries, size], key [batch, key heads, keys, size], value [batch, key heads, keys, value
// size]; any strides with a dense last dimension, so [B,S,H,D], [B,H,S,D] and packed QKV need no copy. heads is a
// multiple of key heads: query head h reads key head h / (heads / key heads). Packed sequences: batch is 1, and
// sequence i of query_offsets.size - 1 is queries query_offsets[i] up to query_offsets[i + 1], keys likewise
// (cu_seqlens, read on the device; what lies past the last offset belongs to nobody: output 0, lse -inf, gradients 0).
// Then batch, q and k of scores, bias, mask, ALiBi, key_lengths, dropout and programs count sequences and places inside
// one. Types: fp32, bf16 and fp16, and fp64 on the CPU. Sums, scores and lse are fp32 (double in the
// reference and for fp64; what is fp32 below is fp64 for fp64); probabilities are rounded to value's type before the
// second product, as every fused attention does. Keys from key_lengths (clamped to 0..keys) on are padding, which no
// query sees. Offset: keys of the sequence - queries of it (aligned bottom-right), with key lengths what
// attention_alignment_cuda.h makes of them, unless causal_offset names another. causal keeps k <= q + offset; window
// (l, r) keeps -l <= k - (q + offset) <= r, -1 is unbounded. Offsets, windows and block sizes may be any of 64 bits.
// Segments: equal ids that are not -1 attend. A score of -inf is one that is not kept. Rows with nothing kept: output
// 0, lse -inf (the sink's logit if there is one), gradients 0. Sizes of 0 are legal. Dropout: see
// attention_dropout_cuda.h; the lse is that of the scores without dropout.
//
// Parts: attention over all keys is a call for each part of them. Forward adds to what output and lse hold
// (`accumulate`), and first_query and first_key say where the parts lie in the whole; backward takes the whole's output
// and lse, and adds to fp32 gradients. Any split gives what one call gives, up to the rounding of fp32. Sinks are given
// to one of the parts.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "kernel_pytorch/base/export.h"
#include "kernel_pytorch/base/tensor_view.h"
#include "kernel_pytorch/device/context.h"

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

// What stands between the products. Absent parts cost nothing: kernels are compiled for those present.
struct Scoring {
  double scale = 1.0;
  double softcap = 0;  // 0: none
  bool softcap_after_bias = false;
  bool causal = false;
  std::optional<int64_t> causal_offset{};
  int64_t window_left = -1, window_right = -1;
  // [batch, heads, queries, keys] (packed: [sequences, heads, longest_query, longest_key]), strides 0 where broadcast;
  // query's type or fp32, dense in keys
  TensorView bias{};
  TensorView alibi_slopes{};  // fp32 [batch, heads], strides 0 where broadcast
  TensorView mask{};          // bool, bias' shape, any strides; true keeps
  TensorView sinks{};         // fp32 [heads]
  // int32 [batch, queries], [batch, keys] (packed: of tokens), strides 0 where broadcast; both or neither
  TensorView query_segments{}, key_segments{};
  TensorView key_lengths{};                    // int32 [batch]
  TensorView query_offsets{}, key_offsets{};   // int32 [sequences + 1]; both or neither
  int64_t longest_query = 0, longest_key = 0;  // with offsets: no sequence is longer
  BlockList blocks{};
  double dropout = 0;                   // probability
  TensorView seed{};                    // int64 [2]: seed, offset
  std::string score_mod{}, mask_mod{};  // programs of kernel_pytorch/expression; empty: none
  std::vector<TensorView> captured{};   // what the programs load
  // Of a part: what number its first query and key have in the whole. causal_offset, to be given where it matters,
  // dropout and programs count as the whole does; bias, mask, segments, blocks and key_lengths are the part's own. Not
  // for packed sequences.
  int64_t first_query = 0, first_key = 0;
  bool deterministic = false;    // backward: bitwise equal from run to run
  bool batch_invariant = false;  // forward: a row's bits do not depend on its neighbours
  // CUDA, fp32: operands of products may be rounded to tf32's 11 bits, a third of the work. Else products are right to
  // fp32's rounding; an infinite element gives NaN, since it has no rest.
  bool allow_tf32 = false;

  bool is_packed() const { return query_offsets.is_present(); }
  bool has_window() const { return window_left >= 0 || window_right >= 0; }
  bool is_part() const { return first_query != 0 || first_key != 0; }
  // causal_offset between places of this call.
  std::optional<int64_t> offset() const {
    if (!causal_offset.has_value()) return {};
    return *causal_offset + first_query - first_key;
  }
};

struct Forward {
  TensorView query{}, key{}, value{};
  Scoring scoring{};
  // [batch, heads, queries, value size], query's type or fp32; any strides with dense last dimension
  TensorView output{};
  TensorView lse{};  // optional: fp32 (fp64 for fp64) [batch, heads, queries], contiguous
  // output (fp32) and lse hold what other keys gave: both together are written. Where lse is -inf there was nothing
  // yet, and output is not read.
  bool accumulate = false;
};

//   delta = sum(grad_output * output) - grad_lse;  P = exp(score - lse);  dP = drop(grad_output value^T)
//   dS = P * (dP - delta);  grad_value = drop(P)^T grad_output;  grad_sinks = -sum of exp(sink - lse) * delta
//   grad_bias = dS summed over what bias broadcasts;  grad_query, grad_key through the derivative of score
struct Backward {
  TensorView grad_output{};
  TensorView query{}, key{}, value{};
  TensorView output{}, lse{};
  TensorView grad_lse{};  // optional, as lse
  Scoring scoring{};
  // Shapes of theirs; of their type, or all fp32; any strides, dense last dimension
  TensorView grad_query{}, grad_key{}, grad_value{};
  bool accumulate = false;                  // these three, then fp32, are added to
  bool writes_keys = false;                 // accumulate: all but grad_key and grad_value, which hold nothing yet
  TensorView grad_bias{};                   // optional: fp32, of the sizes that bias does not broadcast, else 1
  TensorView grad_sinks{};                  // optional: fp32 [heads]
  std::vector<TensorView> grad_captured{};  // fp32 and contiguous, absent where none is wanted; empty: none wanted

  bool adds_to_keys() const { return accumulate && !writes_keys; }
};

// Throw Error{kInvalidArgument} naming the argument, both values and the cure.
KP_EXPORT void forward(const Forward& arguments, Context& context);
KP_EXPORT void backward(const Backward& arguments, Context& context);

}  // namespace kernel_pytorch::attention
