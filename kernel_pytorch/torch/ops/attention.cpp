// torch.ops.kernel_pytorch.attention*: layouts become strides, whatever broadcasts becomes a stride of 0.
//
// The result's memory follows the query's: where heads come before the sequence in shape but not in memory (a
// transposed projection), so they do in the output and in the gradients, and transposing back costs nothing.
#include "kernel_pytorch/ops/attention/attention.h"

#include <algorithm>
#include <array>
#include <cmath>

#include "kernel_pytorch/base/error.h"
#include "kernel_pytorch/torch/op.h"

namespace kernel_pytorch::torch_ops {
namespace {

using attention::Scoring;

// What the ops take besides their products, in the schemas' order.
struct Options {
  TensorView bias, sinks, alibi_slopes, mask, query_segment_ids, key_segment_ids, key_lengths, cu_seqlens_q,
      cu_seqlens_k, seed;
  std::vector<TensorView> blocks, captured;
  bool heads_first;
  std::optional<double> scale;
  double softcap;
  bool softcap_after_bias, causal;
  std::optional<int64_t> causal_offset;
  int64_t window_left, window_right, max_seqlen_q, max_seqlen_k, query_block, key_block;
  double dropout_p;
  std::string score_mod, mask_mod;
  bool deterministic, batch_invariant, allow_tf32;

  bool is_packed() const { return cu_seqlens_q.is_present() || cu_seqlens_k.is_present(); }
};
#define KP_ATTENTION_OPTIONS                                                                                     \
  "Tensor? bias, Tensor? sinks, Tensor? alibi_slopes, Tensor? mask, Tensor? query_segment_ids, "                 \
  "Tensor? key_segment_ids, Tensor? key_lengths, Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, Tensor? seed, "     \
  "Tensor[] blocks, Tensor[] captured, bool heads_first, float? scale, float softcap, bool softcap_after_bias, " \
  "bool causal, SymInt? causal_offset, int window_left, int window_right, SymInt max_seqlen_q, "                 \
  "SymInt max_seqlen_k, int query_block, int key_block, float dropout_p, str score_mod, str mask_mod, "          \
  "bool deterministic, bool batch_invariant, bool allow_tf32"

// [batch, heads, sequence, size] of what the caller has: that, [batch, sequence, heads, size] or packed [tokens, heads,
// size].
TensorView heads_view(const char* name, const TensorView& view, const Options& options) {
  if (options.is_packed()) {
    KP_CHECK(view.rank == 3, "attention: ", name, " has shape ", shape_text(view.shape()),
             "; packed sequences (cu_seqlens) are [tokens, heads, size]");
    TensorView heads = view;
    heads.rank = 4;
    heads.sizes = {1, view.sizes[1], view.sizes[0], view.sizes[2]};
    heads.strides = {view.sizes[0] * view.strides[0], view.strides[1], view.strides[0], view.strides[2]};
    return heads;
  }
  KP_CHECK(
      view.rank == 4, "attention: ", name, " has shape ", shape_text(view.shape()), "; layout \"",
      options.heads_first ? "bhsd\" is [batch, heads, sequence, size]" : "bshd\" is [batch, sequence, heads, size]",
      ", for one sequence add a batch of 1");
  TensorView heads = view;
  if (options.heads_first) return heads;
  std::swap(heads.sizes[1], heads.sizes[2]);
  std::swap(heads.strides[1], heads.strides[2]);
  return heads;
}

// A result of the shape of `like` with another size, its dimensions 1 and 2 in the order of like's memory.
TensorView output_like_rows(Call& call, const TensorView& like, int64_t size, const Options& options) {
  TensorView made = like;
  made.sizes[like.rank - 1] = size;
  if (!options.is_packed() && options.heads_first && like.strides[1] < like.strides[2]) {
    std::swap(made.sizes[1], made.sizes[2]);
    made = contiguous_view(nullptr, like.dtype, made.shape());
    std::swap(made.sizes[1], made.sizes[2]);
    std::swap(made.strides[1], made.strides[2]);
    return call.output(made);
  }
  return call.output(made.shape(), like.dtype);
}

TensorView lse_view(const TensorView& lse, const Options& options) {
  if (!lse.is_present() || !options.is_packed()) return lse;
  KP_CHECK(lse.rank == 2, "attention: lse has shape ", shape_text(lse.shape()), "; it must be [heads, tokens]");
  return contiguous_view(lse.data, lse.dtype, {1, lse.sizes[0], lse.sizes[1]}, lse.device);
}

// As [sizes...], broadcasting as torch does: dimensions in front are added, sizes of 1 are repeated.
TensorView broadcast(const char* name, const TensorView& view, std::initializer_list<int64_t> sizes) {
  if (!view.is_present()) return view;
  const int missing = static_cast<int>(sizes.size()) - view.rank;
  KP_CHECK(missing >= 0, "attention: ", name, " has shape ", shape_text(view.shape()), "; it must broadcast to ",
           shape_text({sizes.begin(), sizes.size()}));
  TensorView wide = view;
  wide.rank = static_cast<int8_t>(sizes.size());
  for (int i = wide.rank - 1; i >= 0; --i) {
    const int64_t wanted = sizes.begin()[i];
    const bool is_repeated = i < missing || (view.sizes[i - missing] == 1 && wanted != 1);
    wide.sizes[i] = is_repeated ? wanted : view.sizes[i - missing];
    wide.strides[i] = is_repeated ? 0 : view.strides[i - missing];
  }
  return wide;
}

// As broadcast, of a tensor that names the last dimension at least.
TensorView broadcast_rows(const char* name, const TensorView& view, std::initializer_list<int64_t> sizes,
                          const char* accepted) {
  KP_CHECK(!view.is_present() || view.rank == 1 || view.rank == 2, "attention: ", name, " has shape ",
           shape_text(view.shape()), "; it must be ", accepted);
  return broadcast(name, view, sizes);
}

attention::BlockList block_list(const Options& options) {
  const std::vector<TensorView>& given = options.blocks;
  if (given.empty()) return {};
  KP_CHECK(given.size() == 2 || given.size() == 4 || given.size() == 8, "attention: a block list of ", given.size(),
           " tensors; it has counts and indices by query, 2, for gradients by key too, and as many of full blocks");
  attention::BlockList list{.query_block = options.query_block, .key_block = options.key_block};
  list.key_counts = given[0], list.key_blocks = given[1];
  if (given.size() == 2) return list;
  list.query_counts = given[2], list.query_blocks = given[3];
  if (given.size() == 4) return list;
  list.full_key_counts = given[4], list.full_key_blocks = given[5];
  list.full_query_counts = given[6], list.full_query_blocks = given[7];
  return list;
}

Scoring scoring_of(const Options& options, const TensorView& query, const TensorView& key) {
  const bool is_packed = options.is_packed();
  const int64_t sequences = is_packed ? std::max<int64_t>(options.cu_seqlens_q.element_count() - 1, 0) : query.sizes[0];
  KP_CHECK(options.max_seqlen_q >= 0 && options.max_seqlen_k >= 0, "attention: max_seqlen_q is ", options.max_seqlen_q,
           ", max_seqlen_k is ", options.max_seqlen_k, "; give the length of the longest sequence, or none");
  // Without a bound no sequence is longer than all tokens: nobody waits for the device to say more.
  const int64_t queries = is_packed && options.max_seqlen_q > 0 ? options.max_seqlen_q : query.sizes[2];
  const int64_t keys = is_packed && options.max_seqlen_k > 0 ? options.max_seqlen_k : key.sizes[2];
  const double usual_scale = 1 / std::sqrt(static_cast<double>(std::max<int64_t>(query.sizes[3], 1)));
  Scoring scoring{.scale = options.scale.value_or(usual_scale),
                  .softcap = options.softcap,
                  .softcap_after_bias = options.softcap_after_bias,
                  .causal = options.causal,
                  .causal_offset = options.causal_offset,
                  .window_left = options.window_left,
                  .window_right = options.window_right};
  scoring.bias = broadcast("bias", options.bias, {sequences, query.sizes[1], queries, keys});
  scoring.mask = broadcast("mask", options.mask, {sequences, query.sizes[1], queries, keys});
  scoring.alibi_slopes =
      broadcast_rows("alibi_slopes", options.alibi_slopes, {sequences, query.sizes[1]}, "[heads] or [batch, heads]");
  scoring.sinks = options.sinks;
  constexpr const char* kSegments = "[batch, sequence], or [sequence] for the whole batch (packed: [tokens])";
  scoring.query_segments =
      broadcast_rows("query_segment_ids", options.query_segment_ids, {query.sizes[0], query.sizes[2]}, kSegments);
  scoring.key_segments =
      broadcast_rows("key_segment_ids", options.key_segment_ids, {key.sizes[0], key.sizes[2]}, kSegments);
  scoring.key_lengths = options.key_lengths;
  scoring.query_offsets = options.cu_seqlens_q;
  scoring.key_offsets = options.cu_seqlens_k;
  scoring.longest_query = is_packed ? queries : 0;
  scoring.longest_key = is_packed ? keys : 0;
  scoring.blocks = block_list(options);
  scoring.dropout = options.dropout_p;
  scoring.seed = options.seed;
  scoring.score_mod = options.score_mod;
  scoring.mask_mod = options.mask_mod;
  scoring.captured = options.captured;
  scoring.deterministic = options.deterministic;
  scoring.batch_invariant = options.batch_invariant;
  scoring.allow_tf32 = options.allow_tf32;
  return scoring;
}

DType statistic_type(DType dtype) {
  return dtype == DType::kFloat64 ? DType::kFloat64 : DType::kFloat32;
}

void run_forward(Call& call, const TensorView& query, const TensorView& key, const TensorView& value, bool with_lse,
                 const Options& options) {
  attention::Forward arguments{.query = heads_view("query", query, options),
                               .key = heads_view("key", key, options),
                               .value = heads_view("value", value, options)};
  arguments.scoring = scoring_of(options, arguments.query, arguments.key);
  arguments.output = heads_view("output", output_like_rows(call, query, value.size(-1), options), options);
  const TensorView& rows = arguments.query;
  const int64_t packed_shape[] = {rows.sizes[1], rows.sizes[2]};
  const int64_t shape[] = {rows.sizes[0], rows.sizes[1], rows.sizes[2]}, nothing[] = {0};
  const std::span<const int64_t> wanted = options.is_packed() ? std::span<const int64_t>(packed_shape) : shape;
  const TensorView lse =
      call.output(with_lse ? wanted : std::span<const int64_t>(nothing), statistic_type(query.dtype));
  if (with_lse) arguments.lse = lse_view(lse, options);
  attention::forward(arguments, call.context());
}

// One call over a part of the keys: what it adds to has the layout of what it belongs to.
Scoring part_scoring(const Options& options, const TensorView& query, const TensorView& key, int64_t first_query,
                     int64_t first_key) {
  Scoring scoring = scoring_of(options, query, key);
  scoring.first_query = first_query;
  scoring.first_key = first_key;
  return scoring;
}

// A gradient of `view`'s own shape, and as the core sees it.
TensorView broadcast_gradient(Call& call, bool wanted, const TensorView& view, const TensorView& fallback) {
  TensorView like = view;
  like.dtype = statistic_type(fallback.dtype);
  const TensorView made = call.output_like_if(wanted, like, like);
  if (!made.is_present()) return made;
  TensorView wide = contiguous_view(made.data, made.dtype, std::array<int64_t, 4>{1, 1, 1, 1}, made.device);
  for (int i = 0; i < made.rank; ++i) wide.sizes[4 - made.rank + i] = made.sizes[i];
  return contiguous_view(made.data, made.dtype, wide.shape(), made.device);
}

// One flat tensor of the gradients of those captured tensors whose bits are set, one after another.
std::vector<TensorView> captured_gradients(Call& call, const Options& options, int64_t wanted, DType dtype) {
  int64_t elements = 0;
  for (size_t i = 0; i < options.captured.size(); ++i) {
    if (wanted >> i & 1) elements += options.captured[i].element_count();
  }
  const TensorView all = call.output(std::array{elements}, dtype);
  if (wanted == 0) return {};
  std::vector<TensorView> gradients;
  char* at = all.as<char>();
  for (size_t i = 0; i < options.captured.size(); ++i) {
    gradients.emplace_back();
    if (!(wanted >> i & 1)) continue;
    gradients.back() = contiguous_view(at, dtype, options.captured[i].shape(), all.device);
    at += gradients.back().byte_count();
  }
  return gradients;
}

// Of bias, sinks and captured tensors.
void other_gradients(Call& call, bool wants_bias, bool wants_sinks, int64_t wants_captured, const Options& options,
                     const TensorView& query, attention::Backward& arguments) {
  arguments.grad_bias = broadcast_gradient(call, wants_bias, options.bias, query);
  TensorView sinks = options.sinks;
  sinks.dtype = statistic_type(query.dtype);
  arguments.grad_sinks = call.output_like_if(wants_sinks, sinks, sinks);
  arguments.grad_captured = captured_gradients(call, options, wants_captured, statistic_type(query.dtype));
}

template <class... Given>
struct Functions {
  static void infer(Call& call, const DenseView& query, const DenseView& key, const DenseView& value, bool return_lse,
                    Given... given) {
    run_forward(call, query, key, value, return_lse, Options{given...});
  }
  static void forward(Call& call, const DenseView& query, const DenseView& key, const DenseView& value, bool,
                      Given... given) {
    run_forward(call, query, key, value, true, Options{given...});
  }
  static void backward(Call& call, const DenseView& grad_output, const DenseView& query, const DenseView& key,
                       const DenseView& value, const DenseView& output, const ParameterView& lse,
                       const ParameterView& grad_lse, bool wants_bias, bool wants_sinks, int64_t wants_captured,
                       Given... given) {
    const Options options{given...};
    attention::Backward arguments{.grad_output = heads_view("grad_output", grad_output, options),
                                  .query = heads_view("query", query, options),
                                  .key = heads_view("key", key, options),
                                  .value = heads_view("value", value, options),
                                  .output = heads_view("output", output, options),
                                  .lse = lse_view(lse, options),
                                  .grad_lse = lse_view(grad_lse, options)};
    arguments.scoring = scoring_of(options, arguments.query, arguments.key);
    arguments.grad_query = heads_view("query", output_like_rows(call, query, query.size(-1), options), options);
    arguments.grad_key = heads_view("key", output_like_rows(call, key, key.size(-1), options), options);
    arguments.grad_value = heads_view("value", output_like_rows(call, value, value.size(-1), options), options);
    other_gradients(call, wants_bias, wants_sinks, wants_captured, options, query, arguments);
    attention::backward(arguments, call.context());
  }
  static void part(Call& call, const TensorView& output, const TensorView& lse, const DenseView& query,
                   const DenseView& key, const DenseView& value, int64_t first_query, int64_t first_key,
                   Given... given) {
    const Options options{given...};
    attention::Forward arguments{.query = heads_view("query", query, options),
                                 .key = heads_view("key", key, options),
                                 .value = heads_view("value", value, options)};
    arguments.scoring = part_scoring(options, arguments.query, arguments.key, first_query, first_key);
    arguments.output = heads_view("output", output, options);
    arguments.lse = lse_view(lse, options);
    arguments.accumulate = true;
    attention::forward(arguments, call.context());
  }
  static void part_backward(Call& call, const TensorView& grad_query, const TensorView& grad_key,
                            const TensorView& grad_value, const DenseView& grad_output, const DenseView& query,
                            const DenseView& key, const DenseView& value, const DenseView& output,
                            const ParameterView& lse, const ParameterView& grad_lse, bool wants_bias, bool wants_sinks,
                            int64_t wants_captured, int64_t first_query, int64_t first_key, bool writes_keys,
                            Given... given) {
    const Options options{given...};
    attention::Backward arguments{.grad_output = heads_view("grad_output", grad_output, options),
                                  .query = heads_view("query", query, options),
                                  .key = heads_view("key", key, options),
                                  .value = heads_view("value", value, options),
                                  .output = heads_view("output", output, options),
                                  .lse = lse_view(lse, options),
                                  .grad_lse = lse_view(grad_lse, options)};
    arguments.scoring = part_scoring(options, arguments.query, arguments.key, first_query, first_key);
    arguments.grad_query = heads_view("grad_query", grad_query, options);
    arguments.grad_key = heads_view("grad_key", grad_key, options);
    arguments.grad_value = heads_view("grad_value", grad_value, options);
    arguments.accumulate = true;
    arguments.writes_keys = writes_keys;
    other_gradients(call, wants_bias, wants_sinks, wants_captured, options, query, arguments);
    attention::backward(arguments, call.context());
  }
};
using Attention =
    Functions<const DenseView&, const ParameterView&, const TensorView&, const TensorView&, const DenseView&,
              const DenseView&, const ParameterView&, const ParameterView&, const ParameterView&, const ParameterView&,
              const std::vector<TensorView>&, const std::vector<TensorView>&, bool, std::optional<double>, double, bool,
              bool, std::optional<int64_t>, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, double,
              const std::string&, const std::string&, bool, bool, bool>;

using Ops =
    OpList<Op<"attention(Tensor query, Tensor key, Tensor value, bool return_lse, " KP_ATTENTION_OPTIONS
              ") -> (Tensor output, Tensor lse)",
              Attention::infer>,
           Op<"attention_forward(Tensor query, Tensor key, Tensor value, bool return_lse, " KP_ATTENTION_OPTIONS
              ") -> (Tensor output, Tensor lse)",
              Attention::forward>,
           Op<"attention_backward(Tensor grad_output, Tensor query, Tensor key, Tensor value, Tensor output, "
              "Tensor lse, Tensor? grad_lse, bool wants_bias, bool wants_sinks, int wants_captured, "  //
              KP_ATTENTION_OPTIONS
              ") -> (Tensor grad_query, Tensor grad_key, Tensor grad_value, Tensor grad_bias, Tensor grad_sinks, "
              "Tensor grad_captured)",
              Attention::backward>,
           Op<"attention_part_(Tensor(a!) output, Tensor(b!) lse, Tensor query, Tensor key, Tensor value, "
              "SymInt first_query, SymInt first_key, " KP_ATTENTION_OPTIONS ") -> ()",
              Attention::part>,
           Op<"attention_part_backward_(Tensor(a!) grad_query, Tensor(b!) grad_key, Tensor(c!) grad_value, "
              "Tensor grad_output, Tensor query, Tensor key, Tensor value, Tensor output, Tensor lse, "
              "Tensor? grad_lse, bool wants_bias, bool wants_sinks, int wants_captured, SymInt first_query, "
              "SymInt first_key, bool writes_keys, "  //
              KP_ATTENTION_OPTIONS ") -> (Tensor grad_bias, Tensor grad_sinks, Tensor grad_captured)",
              Attention::part_backward>>;

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(kernel_pytorch, library) {
  Ops::define(library);
}
STABLE_TORCH_LIBRARY_IMPL(kernel_pytorch, CPU, library) {
  Ops::implement(library);
}
STABLE_TORCH_LIBRARY_IMPL(kernel_pytorch, CUDA, library) {
  Ops::implement(library);
}

}  // namespace kernel_pytorch::torch_ops
