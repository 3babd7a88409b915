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
// Layouts: [batch, heads, sequence, size], or [batch, sequence, heads, size] (heads_first = false), or packed [tokens,
// heads, size] (cu_seqlens); any strides with a dense last dimension, so slices of a packed QKV need no copy. heads of
// query are a multiple of key heads: query head h reads key head h / (heads / key heads). Packed sequences: sequence i
// is queries cu_seqlens_q[i] up to cu_seqlens_q[i + 1], keys likewise (read on the device; what lies past the last
// offset belongs to nobody: output 0, lse -inf, gradients 0). Then batch, q and k of scores, bias, mask, ALiBi,
// key_lengths, dropout and programs count sequences and places inside one. Types: fp32, bf16 and fp16, and fp64 (on
// a GPU not with every option: attention/cuda_double/host.cpp). Sums, scores and lse are fp32 (double in the reference
// and for fp64; what is fp32 below is fp64 for fp64); probabilities are rounded to value's type before the second
// product, as every fused attention does. Keys from key_lengths (clamped to 0..keys) on are padding, which no query
// sees. Offset: keys of the sequence - queries of it (aligned bottom-right), with key lengths what
// attention/cuda/alignment_cuda.h makes of them, unless causal_offset names another. causal keeps k <= q + offset;
// window (l, r) keeps -l <= k - (q + offset) <= r, -1 is unbounded. Offsets, windows and block sizes may be any of 64
// bits. Segments: equal ids that are not -1 attend. A score of -inf is one that is not kept. Rows with nothing kept:
// output 0, lse -inf (the sink's logit if there is one), gradients 0. Sizes of 0 are legal. Dropout: see
// attention/cuda/dropout_cuda.h; the lse is that of the scores without dropout.
//
// Parts: attention over all keys is a call for each part of them. forward_part adds to what output and lse hold, and
// first_query and first_key say where the parts lie in the whole; backward_part takes the whole's output and lse, and
// adds to fp32 gradients. Any split gives what one call gives, up to the rounding of fp32. Sinks are given
// to one of the parts.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "kernel_pytorch/base/export.h"
#include "kernel_pytorch/base/fields.h"
#include "kernel_pytorch/base/tensor_view.h"
#include "kernel_pytorch/device/context.h"

namespace kernel_pytorch::attention {

// What stands between the products, and how the tensors are laid out. Absent parts cost nothing: kernels are compiled
// for those present.
struct Options {
  TensorView bias{};          // query's type or fp32; broadcasts to [batch, heads, queries, keys], dense in keys
  TensorView sinks{};         // fp32 [heads]
  TensorView alibi_slopes{};  // fp32 [heads] or [batch, heads]
  TensorView mask{};          // bool, broadcasts as bias, any strides; true keeps
  // int32 [batch, sequence], or [sequence] for the whole batch (packed: [tokens]); both or neither
  TensorView query_segment_ids{}, key_segment_ids{};
  TensorView key_lengths{};                   // int32 [batch]
  TensorView cu_seqlens_q{}, cu_seqlens_k{};  // int32 [sequences + 1], beginning with 0; both or neither
  TensorView seed{};                          // int64 [2]: seed, offset
  bool heads_first = true;
  std::optional<double> scale{};  // none: size ** -0.5
  double softcap = 0;             // 0: none
  bool softcap_after_bias = false;
  bool causal = false;
  std::optional<int64_t> causal_offset{};
  int64_t window_left = -1, window_right = -1;
  int64_t max_seqlen_q = 0, max_seqlen_k = 0;  // with cu_seqlens: no sequence is longer; 0: all tokens
  int64_t query_block = 0, key_block = 0;      // size of a tile of `blocks`
  double dropout_p = 0;
  std::string score_mod{}, mask_mod{};  // programs of kernel_pytorch/expression; empty: none
  bool deterministic = false;           // backward: bitwise equal from run to run
  bool batch_invariant = false;         // forward: a row's bits do not depend on its neighbours
  // CUDA, fp32: operands of products may be rounded to tf32's 11 bits, a third of the work. Else products are right to
  // fp32's rounding; an infinite element gives NaN, since it has no rest.
  bool allow_tf32 = false;
  // Which tiles of scores exist: counts and indices by query, for gradients by key too, and as many of full tiles; 2,
  // 4 or 8 tensors as attention/problem.h describes them.
  std::vector<TensorView> blocks{};
  std::vector<TensorView> captured{};  // what the programs load
};

inline constexpr auto kOptionFields = field_group<Options>(
    optional_input<&Options::bias>({.memory = MemoryLayout::kDenseLast}),
    optional_input<&Options::sinks>(
        {.shape = "heads", .dtype = "statistic query", .memory = MemoryLayout::kContiguous}),
    optional_input<&Options::alibi_slopes>({.dtype = "statistic query"}),
    optional_input<&Options::mask>({.dtype = "bool"}),
    optional_input<&Options::query_segment_ids>({.dtype = "int32", .memory = MemoryLayout::kDenseLast}),
    optional_input<&Options::key_segment_ids>({.dtype = "int32", .memory = MemoryLayout::kDenseLast}),
    optional_input<&Options::key_lengths>({.dtype = "int32", .memory = MemoryLayout::kContiguous}),
    optional_input<&Options::cu_seqlens_q>({.dtype = "int32", .memory = MemoryLayout::kContiguous}),
    optional_input<&Options::cu_seqlens_k>({.dtype = "int32", .memory = MemoryLayout::kContiguous}),
    optional_input<&Options::seed>({.shape = "2", .dtype = "int64", .memory = MemoryLayout::kContiguous}),
    option<&Options::heads_first>(), option<&Options::scale>(), option<&Options::softcap>({.key = KeyPart::kPresence}),
    option<&Options::softcap_after_bias>({.key = KeyPart::kValue}), option<&Options::causal>({.key = KeyPart::kValue}),
    option<&Options::causal_offset>({.symbolic = true}), option<&Options::window_left>(),
    option<&Options::window_right>(), option<&Options::max_seqlen_q>({.symbolic = true}),
    option<&Options::max_seqlen_k>({.symbolic = true}), option<&Options::query_block>(), option<&Options::key_block>(),
    option<&Options::dropout_p>({.key = KeyPart::kPresence, .trial = "dropout"}),
    option<&Options::score_mod>({.key = KeyPart::kValue}), option<&Options::mask_mod>({.key = KeyPart::kValue}),
    option<&Options::deterministic>({.key = KeyPart::kValue}),
    option<&Options::batch_invariant>({.key = KeyPart::kValue}), option<&Options::allow_tf32>(),
    optional_input<&Options::blocks>(), optional_input<&Options::captured>());

// Shapes by layout: packed, heads first, sequence first.
inline constexpr std::string_view kLayout = "cu_seqlens_q heads_first";
inline constexpr std::string_view kQueryShape =
    "queries heads size | batch heads queries size | batch queries heads size";
inline constexpr std::string_view kKeyShape =
    "keys key_heads size | batch key_heads keys size | batch keys key_heads size";
inline constexpr std::string_view kValueShape =
    "keys key_heads value_size | batch key_heads keys value_size | batch keys key_heads value_size";
inline constexpr std::string_view kOutputShape =
    "queries heads value_size | batch heads queries value_size | batch queries heads value_size";
inline constexpr std::string_view kLseShape = "heads queries | batch heads queries | batch heads queries";

struct Forward {
  TensorView query{}, key{}, value{};
  // The positions of a part's first query and key in the whole. causal_offset, to be given where it matters,
  // dropout and programs count as the whole does; bias, mask, segments, blocks and key_lengths are the part's own. Not
  // for packed sequences.
  int64_t first_query = 0, first_key = 0;
  Options options{};
  TensorView output{};  // query's layout with value's size, query's type or fp32; any strides, dense last dimension
  TensorView lse{};     // optional: fp32 (fp64 for fp64) [batch, heads, queries] (packed: [heads, tokens]), contiguous
};

inline constexpr auto kForwardFields = fields<Forward>(
    input<&Forward::query>(
        {.shape = kQueryShape, .shape_by = kLayout, .leads = true, .memory = MemoryLayout::kDenseLast}),
    input<&Forward::key>({.shape = kKeyShape, .shape_by = kLayout, .memory = MemoryLayout::kDenseLast}),
    input<&Forward::value>({.shape = kValueShape, .shape_by = kLayout, .memory = MemoryLayout::kDenseLast}),
    option<&Forward::first_query>({.hidden = true, .symbolic = true}),
    option<&Forward::first_key>({.hidden = true, .symbolic = true}), all_of<&Forward::options, kOptionFields>(),
    output<&Forward::output>({.shape = kOutputShape, .shape_by = kLayout, .order_of = "query", .dtype = "query"}),
    saved<&Forward::lse>(
        {.shape = kLseShape, .shape_by = kLayout, .dtype = "statistic query", .wanted = "return_lse"}));

//   delta = sum(grad_output * output) - grad_lse;  P = exp(score - lse);  dP = drop(grad_output value^T)
//   dS = P * (dP - delta);  grad_value = drop(P)^T grad_output;  grad_sinks = -sum of exp(sink - lse) * delta
//   grad_bias = dS summed over what bias broadcasts;  grad_query, grad_key through the derivative of score
struct Backward {
  TensorView grad_output{};
  TensorView query{}, key{}, value{};
  TensorView output{}, lse{};
  TensorView grad_lse{};                   // optional, as lse
  int64_t wants_captured = 0;              // a bit for each captured tensor
  int64_t first_query = 0, first_key = 0;  // as in Forward
  bool writes_keys = false;                // backward_part: grad_key and grad_value hold nothing yet and are written
  Options options{};
  // Shapes of theirs; of their type, or all fp32; any strides, dense last dimension
  TensorView grad_query{}, grad_key{}, grad_value{};
  TensorView grad_bias{};      // optional: fp32, of the shape of bias
  TensorView grad_sinks{};     // optional: fp32 [heads]
  TensorView grad_captured{};  // fp32, one row: the gradients of the captured tensors that are wanted
};

inline constexpr auto kBackwardFields = fields<Backward>(
    input<&Backward::grad_output>({.shape = kOutputShape, .shape_by = kLayout, .memory = MemoryLayout::kDenseLast}),
    input<&Backward::query>(
        {.shape = kQueryShape, .shape_by = kLayout, .leads = true, .memory = MemoryLayout::kDenseLast}),
    input<&Backward::key>({.shape = kKeyShape, .shape_by = kLayout, .memory = MemoryLayout::kDenseLast}),
    input<&Backward::value>({.shape = kValueShape, .shape_by = kLayout, .memory = MemoryLayout::kDenseLast}),
    input<&Backward::output>({.shape = kOutputShape, .shape_by = kLayout, .memory = MemoryLayout::kDenseLast}),
    input<&Backward::lse>({.shape = kLseShape, .shape_by = kLayout, .memory = MemoryLayout::kContiguous}),
    optional_input<&Backward::grad_lse>({.shape = kLseShape, .shape_by = kLayout, .memory = MemoryLayout::kContiguous}),
    option<&Backward::wants_captured>(), option<&Backward::first_query>({.hidden = true, .symbolic = true}),
    option<&Backward::first_key>({.hidden = true, .symbolic = true}), option<&Backward::writes_keys>({.hidden = true}),
    all_of<&Backward::options, kOptionFields>(),
    output<&Backward::grad_query>({.shape = kQueryShape, .shape_by = kLayout, .order_of = "query", .dtype = "query"}),
    output<&Backward::grad_key>({.shape = kKeyShape, .shape_by = kLayout, .order_of = "key", .dtype = "key"}),
    output<&Backward::grad_value>({.shape = kValueShape, .shape_by = kLayout, .order_of = "value", .dtype = "value"}),
    output<&Backward::grad_bias>({.shape = "like bias", .dtype = "statistic query", .wanted = "wants_bias"}),
    output<&Backward::grad_sinks>({.shape = "like sinks", .dtype = "statistic query", .wanted = "wants_sinks"}),
    output<&Backward::grad_captured>({.shape = "row captured wants_captured", .dtype = "statistic query"}));

// Throw Error{kInvalidArgument} naming the argument, both values and the cure.
KP_EXPORT void forward(const Forward& arguments, Context& context);
KP_EXPORT void backward(const Backward& arguments, Context& context);

// Output (fp32) and lse hold what other keys gave: both together are written. Where lse is -inf there was nothing yet,
// and output is not read.
KP_EXPORT void forward_part(const Forward& arguments, Context& context);
// Adds to grad_query, grad_key and grad_value, which are fp32.
KP_EXPORT void backward_part(const Backward& arguments, Context& context);

}  // namespace kernel_pytorch::attention
