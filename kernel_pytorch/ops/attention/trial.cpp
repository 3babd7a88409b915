#include "kernel_pytorch/ops/attention/trial.h"

#include <algorithm>
#include <charconv>

#include "kernel_pytorch/base/error.h"
#include "kernel_pytorch/ops/attention/bounds.h"
#include "kernel_pytorch/registry/declared.h"
#include "kernel_pytorch/registry/request_options.h"

namespace kernel_pytorch::attention {
namespace {

using registry::ProblemRequest;

// The request in numbers.
struct Words {
  const ProblemRequest& request;
  Sizes sizes{};
  int layout = 0;

  explicit Words(const ProblemRequest& given);
  int64_t whole(std::string_view name, int64_t fallback) const {
    return registry::integer_option(request, name, fallback);
  }
  bool flag(std::string_view name, bool fallback = false) const {
    return registry::flag_option(request, name, fallback);
  }
  DType number() const { return statistic_type(request.dtype); }
  TensorView view(DType dtype, std::initializer_list<int64_t> shape) const {
    return contiguous_view(nullptr, dtype, shape, request.device);
  }
  TensorView heads_view(int64_t heads, int64_t length, int64_t size) const;
  TensorView result_view(TensorView like) const {
    like.dtype = flag("accumulate") ? number() : registry::dtype_option(request, "results", request.dtype);
    return like;
  }
  TensorView pair_view(std::string_view name, DType dtype) const;
};

Words::Words(const ProblemRequest& given) : request(given) {
  std::vector<std::string_view> known = {
      "layout",     "key_heads",       "value_size", "alibi",          "sinks",       "segments",  "lengths",
      "lse",        "grad_lse",        "bias",       "mask",           "bias_dtype",  "grad_bias", "sequences",
      "blocks",     "blocks_by_batch", "captured",   "captured_dtype", "first_query", "first_key", "results",
      "accumulate", "writes_keys"};
  for (std::string_view name : registry::option_names(kOptions)) {
    // What follows from other words: layout, sequences and blocks.
    const bool is_derived = name == "heads_first" || name.starts_with("max_seqlen") || name.ends_with("_block");
    if (!is_derived) known.push_back(name);
  }
  registry::check_options(request, known);
  const std::vector<int64_t>& shape = request.shape;
  KP_CHECK((shape.size() == 4 || shape.size() == 5) && std::ranges::all_of(shape, [](int64_t n) { return n >= 0; }),
           "shape ", shape_text(shape), ": attention needs batch, heads, queries, keys and size, e.g. ",
           "2x32x4096x4096x128, or batch, heads, sequence and size");
  sizes.batch = sizes.sequences = shape[0];
  sizes.heads = shape[1];
  sizes.queries = sizes.longest_query = shape[2];
  sizes.keys = sizes.longest_key = shape[shape.size() - 2];
  sizes.size = shape.back();
  sizes.key_heads = whole("key_heads", sizes.heads);
  sizes.value_size = whole("value_size", sizes.size);
  KP_CHECK(sizes.key_heads >= 0, "option key_heads=", sizes.key_heads, ": it cannot be negative");
  KP_CHECK(sizes.value_size >= 0, "option value_size=", sizes.value_size, ": it cannot be negative");
  layout = registry::choice_option(request, "layout", {"bhsd", "bshd", "qkv"}, "bhsd");
  const int64_t packed = whole("sequences", 0);
  KP_CHECK(packed >= 0 && (packed == 0 || sizes.batch == 1), "option sequences=", packed,
           ": packed sequences need a batch of 1, not ", sizes.batch);
  if (packed == 0) return;
  sizes.sequences = packed;
  sizes.longest_query = std::min(sizes.queries, sizes.queries / packed * 3 / 2 + 1);
  sizes.longest_key = std::min(sizes.keys, sizes.keys / packed * 3 / 2 + 1);
}

TensorView Words::heads_view(int64_t heads, int64_t length, int64_t size) const {
  TensorView made = view(request.dtype, {sizes.batch, heads, length, size});
  const int64_t width =
      layout == 2 ? (sizes.heads + 2 * sizes.key_heads) * std::max(sizes.size, sizes.value_size) : heads * size;
  if (layout != 0) made.strides = {length * width, size, width, 1};
  return made;
}

// [batch, heads, queries, keys] with strides of 0 where the word says so.
TensorView Words::pair_view(std::string_view name, DType dtype) const {
  const int word = registry::choice_option(request, name, {"none", "full", "batch", "head", "query", "all"}, "none");
  if (word == 0) return {};
  TensorView made = view(dtype, {sizes.sequences, sizes.heads, sizes.longest_query, sizes.longest_key});
  const bool is_broadcast[3] = {word == 2 || word == 5, word == 3 || word == 5, word == 4};
  int64_t stride = sizes.longest_key;
  for (int i = 2; i >= 0; --i) {
    made.strides[i] = is_broadcast[i] ? 0 : stride;
    if (!is_broadcast[i]) stride *= made.sizes[i];
  }
  return made;
}

std::vector<TensorView> captured_views(const Words& words) {
  std::vector<TensorView> views;
  const std::string text = registry::text_option(words.request, "captured");
  const DType dtype = registry::dtype_option(words.request, "captured_dtype", words.number());
  std::vector<int64_t> shape;
  for (const char *at = text.data(), *end = at + text.size(); at != end;) {
    int64_t size = 0;
    const auto [next, error] = std::from_chars(at, end, size);
    KP_CHECK(error == std::errc() && size > 0 && (next == end || *next == 'x' || *next == ','),
             "option captured=", text, ": sizes are needed, e.g. 4x32,7");
    shape.push_back(size);
    const bool is_last = next == end || *next == ',';
    at = next == end ? end : next + 1;
    if (!is_last) continue;
    views.push_back(contiguous_view(nullptr, dtype, shape, words.request.device));
    shape.clear();
  }
  return views;
}

BlockList make_blocks(const Words& words, int64_t tile) {
  KP_CHECK(tile >= 0, "option blocks=", tile, ": a tile cannot be negative");
  if (tile == 0) return {};
  const Sizes& sizes = words.sizes;
  const int64_t rows = (sizes.longest_query + tile - 1) / tile, columns = (sizes.longest_key + tile - 1) / tile;
  const int64_t heads = sizes.heads, batch = words.flag("blocks_by_batch") ? sizes.sequences : 1;
  BlockList list{.query_block = tile, .key_block = tile};
  list.key_counts = list.full_key_counts = words.view(DType::kInt32, {batch, heads, rows});
  list.key_blocks = list.full_key_blocks = words.view(DType::kInt32, {batch, heads, rows, columns});
  list.query_counts = list.full_query_counts = words.view(DType::kInt32, {batch, heads, columns});
  list.query_blocks = list.full_query_blocks = words.view(DType::kInt32, {batch, heads, columns, rows});
  return list;
}

Scoring make_scoring(const Words& words) {
  const Sizes& sizes = words.sizes;
  Scoring scoring;
  registry::make_options(kOptions, words.request, static_cast<Options*>(&scoring));
  if (!scoring.scale) scoring.scale = default_scale(sizes.size);
  scoring.bias = words.pair_view("bias", registry::dtype_option(words.request, "bias_dtype", words.request.dtype));
  scoring.mask = words.pair_view("mask", DType::kBool);
  if (words.flag("alibi")) {
    scoring.alibi_slopes = words.view(words.number(), {sizes.sequences, sizes.heads});
    scoring.alibi_slopes.strides[0] = 0;
  }
  if (words.flag("sinks")) scoring.sinks = words.view(words.number(), {sizes.heads});
  if (words.flag("segments")) {
    scoring.query_segment_ids = words.view(DType::kInt32, {sizes.batch, sizes.queries});
    scoring.key_segment_ids = words.view(DType::kInt32, {sizes.batch, sizes.keys});
  }
  if (words.flag("lengths")) scoring.key_lengths = words.view(DType::kInt32, {sizes.sequences});
  if (words.whole("sequences", 0) > 0) {
    scoring.cu_seqlens_q = scoring.cu_seqlens_k = words.view(DType::kInt32, {sizes.sequences + 1});
    scoring.max_seqlen_q = sizes.longest_query;
    scoring.max_seqlen_k = sizes.longest_key;
  }
  scoring.block_list = make_blocks(words, words.whole("blocks", 0));
  if (scoring.dropout_p > 0) scoring.seed = words.view(DType::kInt64, {2});
  scoring.captured = captured_views(words);
  scoring.first_query = words.whole("first_query", 0);
  scoring.first_key = words.whole("first_key", 0);
  if (!has_near_numbers(scoring, sizes)) bound_numbers(scoring, sizes);
  return scoring;
}

}  // namespace

ForwardProblem make_forward(const ProblemRequest& request) {
  const Words words(request);
  const Sizes& sizes = words.sizes;
  ForwardProblem problem;
  problem.query = words.heads_view(sizes.heads, sizes.queries, sizes.size);
  problem.key = words.heads_view(sizes.key_heads, sizes.keys, sizes.size);
  problem.value = words.heads_view(sizes.key_heads, sizes.keys, sizes.value_size);
  problem.scoring = make_scoring(words);
  problem.output = words.result_view(words.heads_view(sizes.heads, sizes.queries, sizes.value_size));
  problem.accumulate = words.flag("accumulate");
  if (words.flag("lse", true)) problem.lse = words.view(words.number(), {sizes.batch, sizes.heads, sizes.queries});
  return problem;
}

BackwardProblem make_backward(const ProblemRequest& request) {
  const Words words(request);
  const ForwardProblem forward = make_forward(request);
  BackwardProblem problem;
  problem.output = forward.output;
  problem.output.dtype = request.dtype;
  problem.grad_output = problem.output;
  problem.query = forward.query;
  problem.key = forward.key;
  problem.value = forward.value;
  problem.grad_query = words.result_view(forward.query);
  problem.grad_key = words.result_view(forward.key);
  problem.grad_value = words.result_view(forward.value);
  problem.accumulate = forward.accumulate;
  problem.writes_keys = words.flag("writes_keys");
  problem.lse = words.view(words.number(), {words.sizes.batch, words.sizes.heads, words.sizes.queries});
  if (words.flag("grad_lse")) problem.grad_lse = problem.lse;
  problem.scoring = forward.scoring;
  if (const TensorView& bias = forward.scoring.bias; bias.is_present() && words.flag("grad_bias", true)) {
    const auto kept = [&](int i) { return bias.strides[i] == 0 && bias.sizes[i] > 1 ? 1 : bias.sizes[i]; };
    problem.grad_bias = words.view(words.number(), {kept(0), kept(1), kept(2), kept(3)});
  }
  if (forward.scoring.sinks.is_present()) problem.grad_sinks = forward.scoring.sinks;
  for (const TensorView& captured : forward.scoring.captured) {
    const bool has_gradient = captured.dtype == words.number();
    problem.grad_captured.push_back(has_gradient ? captured : TensorView{});
  }
  return problem;
}

}  // namespace kernel_pytorch::attention
