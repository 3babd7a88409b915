#include "kernel_pytorch/ops/attention/problem.h"

#include <algorithm>
#include <array>

#include "kernel_pytorch/base/error.h"

namespace kernel_pytorch::attention {
namespace {

bool is_packed(const Options& options) {
  return options.cu_seqlens_q.is_present() || options.cu_seqlens_k.is_present();
}

// [batch, heads, sequence, size] of what the caller has: that, [batch, sequence, heads, size] or packed [tokens, heads,
// size].
TensorView heads_view(const char* name, const TensorView& view, const Options& options) {
  if (!view.is_present()) return view;
  TensorView heads = view;
  if (is_packed(options)) {
    KP_CHECK(view.rank == 3, "attention: ", name, " has shape ", shape_text(view.shape()),
             "; packed sequences (cu_seqlens) are [tokens, heads, size]");
    heads.rank = 4;
    heads.sizes = {1, view.sizes[1], view.sizes[0], view.sizes[2]};
    heads.strides = {view.sizes[0] * view.strides[0], view.strides[1], view.strides[0], view.strides[2]};
    return heads;
  }
  KP_CHECK(
      view.rank == 4, "attention: ", name, " has shape ", shape_text(view.shape()), "; layout \"",
      options.heads_first ? "bhsd\" is [batch, heads, sequence, size]" : "bshd\" is [batch, sequence, heads, size]",
      ", for one sequence add a batch of 1");
  if (options.heads_first) return heads;
  std::swap(heads.sizes[1], heads.sizes[2]);
  std::swap(heads.strides[1], heads.strides[2]);
  return heads;
}

TensorView lse_view(const TensorView& lse, const Options& options) {
  if (!lse.is_present() || !is_packed(options)) return lse;
  KP_CHECK(lse.rank == 2, "attention: lse has shape ", shape_text(lse.shape()), "; it must be [heads, tokens]");
  TensorView batched = lse;
  batched.rank = 3;
  batched.sizes = {1, lse.sizes[0], lse.sizes[1]};
  batched.strides = {lse.sizes[0] * lse.strides[0], lse.strides[0], lse.strides[1]};
  return batched;
}

// As [sizes...], broadcasting as torch does: dimensions in front are added, sizes of 1 are repeated.
void broadcast(const char* name, TensorView& view, std::initializer_list<int64_t> sizes) {
  if (!view.is_present()) return;
  const int missing = static_cast<int>(sizes.size()) - view.rank;
  KP_CHECK(missing >= 0, "attention: ", name, " has shape ", shape_text(view.shape()), "; it must broadcast to ",
           shape_text({sizes.begin(), sizes.size()}));
  view.rank = static_cast<int8_t>(sizes.size());
  for (int i = view.rank - 1; i >= 0; --i) {
    const int64_t wanted = sizes.begin()[i];
    const bool is_repeated = i < missing || (view.sizes[i - missing] == 1 && wanted != 1);
    view.sizes[i] = is_repeated ? wanted : view.sizes[i - missing];
    view.strides[i] = is_repeated ? 0 : view.strides[i - missing];
  }
}

// As broadcast, of a tensor that names the last dimension at least.
void broadcast_rows(const char* name, TensorView& view, std::initializer_list<int64_t> sizes, const char* accepted) {
  KP_CHECK(!view.is_present() || view.rank == 1 || view.rank == 2, "attention: ", name, " has shape ",
           shape_text(view.shape()), "; it must be ", accepted);
  broadcast(name, view, sizes);
}

BlockList block_list_of(const Options& options) {
  const std::vector<TensorView>& given = options.blocks;
  if (given.empty()) return {};
  KP_CHECK(given.size() == 2 || given.size() == 4 || given.size() == 8, "attention: a block list of ", given.size(),
           " tensors; it has counts and indices by query, 2, for gradients by key too, and as many of full blocks");
  BlockList list{.query_block = options.query_block, .key_block = options.key_block};
  list.key_counts = given[0], list.key_blocks = given[1];
  if (given.size() == 2) return list;
  list.query_counts = given[2], list.query_blocks = given[3];
  if (given.size() == 4) return list;
  list.full_key_counts = given[4], list.full_key_blocks = given[5];
  list.full_query_counts = given[6], list.full_query_blocks = given[7];
  return list;
}

// Of views by heads_view; without query or key the checks say which is missing.
template <class Arguments>
Scoring scoring_of(const Arguments& arguments, const TensorView& query, const TensorView& key) {
  Scoring scoring{arguments.options};
  scoring.first_query = arguments.first_query;
  scoring.first_key = arguments.first_key;
  if (!query.is_present() || !key.is_present()) return scoring;
  if (!scoring.scale) scoring.scale = default_scale(query.sizes[3]);
  KP_CHECK(scoring.max_seqlen_q >= 0 && scoring.max_seqlen_k >= 0, "attention: max_seqlen_q is ", scoring.max_seqlen_q,
           ", max_seqlen_k is ", scoring.max_seqlen_k, "; give the length of the longest sequence, or none");
  const bool packed = is_packed(scoring);
  const int64_t sequences = packed ? std::max<int64_t>(scoring.cu_seqlens_q.element_count() - 1, 0) : query.sizes[0];
  // Without a bound no sequence is longer than all tokens: no call waits for the device to know more.
  const int64_t queries = packed && scoring.max_seqlen_q > 0 ? scoring.max_seqlen_q : query.sizes[2];
  const int64_t keys = packed && scoring.max_seqlen_k > 0 ? scoring.max_seqlen_k : key.sizes[2];
  scoring.max_seqlen_q = packed ? queries : 0;
  scoring.max_seqlen_k = packed ? keys : 0;
  const int64_t heads = query.sizes[1];
  broadcast("bias", scoring.bias, {sequences, heads, queries, keys});
  broadcast("mask", scoring.mask, {sequences, heads, queries, keys});
  broadcast_rows("alibi_slopes", scoring.alibi_slopes, {sequences, heads}, "[heads] or [batch, heads]");
  constexpr const char* kSegments = "[batch, sequence], or [sequence] for the whole batch (packed: [tokens])";
  broadcast_rows("query_segment_ids", scoring.query_segment_ids, {query.sizes[0], query.sizes[2]}, kSegments);
  broadcast_rows("key_segment_ids", scoring.key_segment_ids, {key.sizes[0], key.sizes[2]}, kSegments);
  scoring.block_list = block_list_of(scoring);
  scoring.blocks.clear();
  return scoring;
}

// [1, .., 1, sizes of bias]: a kernel sums over what bias broadcasts.
TensorView grad_bias_view(const TensorView& gradient, const TensorView& bias) {
  if (!gradient.is_present() || gradient.rank > 4) return gradient;
  KP_CHECK(!bias.is_present() || std::ranges::equal(gradient.shape(), bias.shape()), "attention: grad_bias has shape ",
           shape_text(gradient.shape()), ", bias has ", shape_text(bias.shape()), "; they must be equal");
  KP_CHECK(is_contiguous(gradient), "attention: grad_bias is ", gradient, "; make it contiguous");
  std::array<int64_t, 4> sizes{1, 1, 1, 1};
  std::ranges::copy(gradient.shape(), sizes.end() - gradient.rank);
  return contiguous_view(gradient.data, gradient.dtype, sizes, gradient.device);
}

std::vector<TensorView> captured_gradients(const Backward& arguments) {
  const std::vector<TensorView>& captured = arguments.options.captured;
  const TensorView& all = arguments.grad_captured;
  const int64_t wanted = arguments.wants_captured;
  KP_CHECK(wanted >= 0 && (captured.size() > 62 || wanted >> captured.size() == 0), "attention: wants_captured is ",
           wanted, ", there are ", captured.size(), " captured tensors; it has a bit for each of them");
  if (wanted == 0) return {};
  int64_t elements = 0;
  for (size_t i = 0; i < captured.size(); ++i) elements += wanted >> i & 1 ? captured[i].element_count() : 0;
  KP_CHECK(all.rank == 1 && all.sizes[0] == elements && is_contiguous(all), "attention: grad_captured has shape ",
           shape_text(all.shape()), "; it must be a row of ", elements,
           " elements, those of the captured tensors that are wanted");
  std::vector<TensorView> gradients;
  char* at = all.as<char>();
  for (size_t i = 0; i < captured.size(); ++i) {
    gradients.emplace_back();
    if (!(wanted >> i & 1)) continue;
    gradients.back() = contiguous_view(at, all.dtype, captured[i].shape(), all.device);
    at += gradients.back().byte_count();
  }
  return gradients;
}

}  // namespace

ForwardProblem problem_of(const Forward& arguments) {
  const Options& options = arguments.options;
  ForwardProblem problem{.query = heads_view("query", arguments.query, options),
                         .key = heads_view("key", arguments.key, options),
                         .value = heads_view("value", arguments.value, options)};
  problem.scoring = scoring_of(arguments, problem.query, problem.key);
  problem.output = heads_view("output", arguments.output, options);
  problem.lse = lse_view(arguments.lse, options);
  return problem;
}

BackwardProblem problem_of(const Backward& arguments) {
  const Options& options = arguments.options;
  BackwardProblem problem{.grad_output = heads_view("grad_output", arguments.grad_output, options),
                          .query = heads_view("query", arguments.query, options),
                          .key = heads_view("key", arguments.key, options),
                          .value = heads_view("value", arguments.value, options),
                          .output = heads_view("output", arguments.output, options),
                          .lse = lse_view(arguments.lse, options),
                          .grad_lse = lse_view(arguments.grad_lse, options)};
  problem.scoring = scoring_of(arguments, problem.query, problem.key);
  problem.grad_query = heads_view("grad_query", arguments.grad_query, options);
  problem.grad_key = heads_view("grad_key", arguments.grad_key, options);
  problem.grad_value = heads_view("grad_value", arguments.grad_value, options);
  problem.grad_bias = grad_bias_view(arguments.grad_bias, options.bias);
  problem.grad_sinks = arguments.grad_sinks;
  problem.grad_captured = captured_gradients(arguments);
  return problem;
}

}  // namespace kernel_pytorch::attention
