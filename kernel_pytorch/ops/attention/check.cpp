#include "kernel_pytorch/ops/attention/check.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <string_view>

#include "kernel_pytorch/base/error.h"
#include "kernel_pytorch/ops/attention/bounds.h"
#include "kernel_pytorch/ops/attention/programs.h"
#include "kernel_pytorch/ops/support/packed_offsets.h"

namespace kernel_pytorch::attention {
namespace {

struct Check {
  std::string_view op;
  Device device;
  const Scoring& scoring;
  DType dtype{};  // of query
  Sizes sizes{};

  void check_present(std::string_view name, const TensorView& view) const {
    KP_CHECK(view.is_present(), op, ": ", name, " is missing");
    KP_CHECK(view.device == device, op, ": ", name, " is on ", view.device, ", the call runs on ", device,
             "; move all tensors to one device");
  }
  void check_type(std::string_view name, const TensorView& view, DType wanted) const {
    KP_CHECK(view.dtype == wanted, op, ": ", name, " is ", view.dtype, ", query is ", dtype, "; it must be ", wanted);
  }
  void check_shape(std::string_view name, const TensorView& view, std::initializer_list<int64_t> wanted,
                   std::string_view meaning) const {
    KP_CHECK(std::ranges::equal(view.shape(), wanted), op, ": ", name, " has shape ", shape_text(view.shape()),
             "; it must be ", shape_text({wanted.begin(), wanted.size()}), ", ", meaning);
  }
  void check_dense(std::string_view name, const TensorView& view) const {
    KP_CHECK(view.size(-1) <= 1 || view.stride(-1) == 1 || view.element_count() == 0, op, ": ", name, " has stride ",
             view.stride(-1), " in its last dimension; make it contiguous there");
  }
  void check_contiguous(std::string_view name, const TensorView& view) const {
    KP_CHECK(is_contiguous(view), op, ": ", name, " is ", view, "; make it contiguous");
  }
  // A tensor of numbers with its exact type, shape and no strides; an absent one is right.
  void check_plain(std::string_view name, const TensorView& view, DType type, std::initializer_list<int64_t> wanted,
                   std::string_view meaning) const {
    if (!view.is_present()) return;
    check_present(name, view);
    check_type(name, view, type);
    check_shape(name, view, wanted, meaning);
    check_contiguous(name, view);
  }
  // The tensor must have the query's type and dense rows.
  void check_rows(std::string_view name, const TensorView& view, std::initializer_list<int64_t> wanted,
                  std::string_view meaning) const {
    check_rows(name, view, dtype, wanted, meaning);
  }
  void check_rows(std::string_view name, const TensorView& view, DType type, std::initializer_list<int64_t> wanted,
                  std::string_view meaning) const {
    check_present(name, view);
    check_type(name, view, type);
    check_shape(name, view, wanted, meaning);
    check_dense(name, view);
  }

  void check_products(const TensorView& query, const TensorView& key, const TensorView& value);
  void check_packed() const;
  void check_part() const;
  // The type of a result: the query's or fp32; fp32 if the kernel adds to it.
  DType result_type(const TensorView& view, bool is_added_to) const {
    const DType number = statistic_type(dtype);
    return is_added_to || view.dtype == number ? number : dtype;
  }
  void check_scoring() const;
  void check_blocks(bool is_backward) const;
  void check_block_list(std::string_view name, const TensorView& counts, const TensorView& blocks, int64_t rows,
                        int64_t columns) const;
};

void Check::check_products(const TensorView& query, const TensorView& key, const TensorView& value) {
  check_present("query", query);
  check_present("key", key);
  check_present("value", value);
  dtype = query.dtype;
  const bool is_known =
      dtype == DType::kFloat32 || dtype == DType::kFloat64 || dtype == DType::kBFloat16 || dtype == DType::kFloat16;
  KP_CHECK(is_known, op, ": query is ", dtype, "; convert it to bf16, fp16, fp32 or fp64");
  for (const auto& [name, view] : {std::pair{"query", &query}, {"key", &key}, {"value", &value}}) {
    KP_CHECK(view->rank == 4, op, ": ", name, " has shape ", shape_text(view->shape()),
             "; it must be [batch, heads, sequence, size]");
    check_type(name, *view, dtype);
    check_dense(name, *view);
  }
  sizes = sizes_of(query, key, value, scoring.is_packed() && scoring.cu_seqlens_q.rank != 1 ? Scoring{} : scoring);
  check_shape("key", key, {sizes.batch, sizes.key_heads, sizes.keys, sizes.size}, "batch and size of query");
  check_shape("value", value, {sizes.batch, sizes.key_heads, sizes.keys, sizes.value_size}, "all but the size of key");
  KP_CHECK(sizes.key_heads > 0 ? sizes.heads % sizes.key_heads == 0 : sizes.heads == 0, op, ": query has ", sizes.heads,
           " heads, key has ", sizes.key_heads, "; the first must be a multiple of the second");
}

void Check::check_packed() const {
  const TensorView &queries = scoring.cu_seqlens_q, &keys = scoring.cu_seqlens_k;
  KP_CHECK(queries.is_present() == keys.is_present(), op, ": query offsets are ",
           queries.is_present() ? "given" : "absent", ", key offsets are ", keys.is_present() ? "given" : "absent",
           "; they go together");
  if (!queries.is_present()) return;
  KP_CHECK(sizes.batch == 1, op, ": the batch is ", sizes.batch, "; packed sequences have a batch of 1");
  KP_CHECK(queries.rank == 1 && queries.size(0) >= 1, op, ": query offsets have shape ", shape_text(queries.shape()),
           "; they must be [sequences + 1], beginning with 0");
  check_plain("query offsets", queries, DType::kInt32, {sizes.sequences + 1}, "one more than sequences");
  check_plain("key offsets", keys, DType::kInt32, {sizes.sequences + 1}, "as query offsets");
  constexpr int64_t kMost = (int64_t{1} << 31) - 1;
  const bool is_bounded = scoring.max_seqlen_q >= 0 && scoring.max_seqlen_q <= kMost && scoring.max_seqlen_k >= 0 &&
                          scoring.max_seqlen_k <= kMost;
  KP_CHECK(is_bounded, op, ": the longest sequence has ", scoring.max_seqlen_q, " queries and ", scoring.max_seqlen_k,
           " keys; give bounds from 0 to 2^31 - 1, at best the lengths of the longest");
}

void Check::check_part() const {
  if (!scoring.is_part()) return;
  KP_CHECK(scoring.first_query >= 0 && scoring.first_key >= 0, op, ": the part begins at query ", scoring.first_query,
           " and key ", scoring.first_key, "; neither can be negative");
  constexpr int64_t kPlaces = int64_t{1} << 31;
  const bool counts = scoring.dropout_p > 0 || has_programs(scoring);
  KP_CHECK(!counts || (scoring.first_query <= kPlaces - sizes.queries && scoring.first_key <= kPlaces - sizes.keys), op,
           ": the part begins at query ", scoring.first_query, " and key ", scoring.first_key,
           "; dropout, score_mod and mask_mod count up to 2^31 of each");
  KP_CHECK(!scoring.is_packed(), op, ": packed sequences are given as a part of a whole; give segment ids instead");
  const bool is_aligned = scoring.causal || scoring.has_window() || scoring.alibi_slopes.is_present();
  KP_CHECK(!is_aligned || scoring.causal_offset.has_value(), op, ": the part begins at query ", scoring.first_query,
           " and key ", scoring.first_key, " and causal_offset is missing; give keys - queries of the whole");
}

void Check::check_scoring() const {
  KP_CHECK(std::isfinite(*scoring.scale), op, ": scale is ", *scoring.scale, "; it must be finite");
  KP_CHECK(scoring.softcap >= 0 && std::isfinite(scoring.softcap), op, ": softcap is ", scoring.softcap,
           "; it must be positive, or 0 for none");
  KP_CHECK(scoring.window_left >= -1 && scoring.window_right >= -1, op, ": the window is (", scoring.window_left, ", ",
           scoring.window_right, "); its sides must be at least -1, which is unbounded");
  const DType number = statistic_type(dtype);
  const std::initializer_list<int64_t> all = {sizes.sequences, sizes.heads, sizes.longest_query, sizes.longest_key};
  constexpr std::string_view kAll = "batch, heads, queries and keys (expand it)";
  if (const TensorView& bias = scoring.bias; bias.is_present()) {
    check_present("bias", bias);
    KP_CHECK(bias.dtype == dtype || bias.dtype == number, op, ": bias is ", bias.dtype, ", query is ", dtype,
             "; it must be ", dtype, " or ", number);
    check_shape("bias", bias, all, kAll);
    check_dense("bias", bias);
  }
  if (const TensorView& mask = scoring.mask; mask.is_present()) {
    check_present("mask", mask);
    KP_CHECK(mask.dtype == DType::kBool, op, ": mask is ", mask.dtype, "; it must be bool, true where a key is kept");
    check_shape("mask", mask, all, kAll);
  }
  if (const TensorView& slopes = scoring.alibi_slopes; slopes.is_present()) {
    check_present("alibi_slopes", slopes);
    check_type("alibi_slopes", slopes, number);
    check_shape("alibi_slopes", slopes, {sizes.sequences, sizes.heads}, "batch and heads (expand it)");
    KP_CHECK(!is_beyond_alibi(scoring), op, ": causal_offset is ", *scoring.causal_offset,
             " and there are alibi_slopes; their distances are exact up to 2^24, use an offset within that");
  }
  check_plain("sinks", scoring.sinks, number, {sizes.heads}, "heads");
  check_plain("key_lengths", scoring.key_lengths, DType::kInt32, {sizes.sequences}, "batch");
  KP_CHECK(scoring.query_segment_ids.is_present() == scoring.key_segment_ids.is_present(), op,
           ": segment ids are given for one of query and key; give both");
  if (scoring.query_segment_ids.is_present()) {
    for (const auto& [name, view, length] : {std::tuple{"query_segment_ids", &scoring.query_segment_ids, sizes.queries},
                                             {"key_segment_ids", &scoring.key_segment_ids, sizes.keys}}) {
      check_present(name, *view);
      check_type(name, *view, DType::kInt32);
      check_shape(name, *view, {sizes.batch, length}, "batch and sequence (expand it)");
      check_dense(name, *view);
    }
  }
  KP_CHECK(scoring.dropout_p >= 0 && scoring.dropout_p <= 1, op, ": dropout_p is ", scoring.dropout_p,
           "; it must lie in [0, 1]");
  KP_CHECK(scoring.dropout_p == 0 || scoring.seed.is_present(), op, ": dropout_p is ", scoring.dropout_p,
           " and seed is missing; give an int64 tensor of seed and offset");
  check_plain("seed", scoring.seed, DType::kInt64, {2}, "seed and offset");
  for (const TensorView& view : scoring.captured) check_present("a captured tensor", view);
  if (!has_programs(scoring)) return;
  const expression::Mods& mods = programs_of(scoring);
  if (mods.score_mod) expression::check_captures(*mods.score_mod, scoring.captured, op);
  if (!mods.mask_mod) return;
  expression::check_captures(*mods.mask_mod, scoring.captured, op);
  const auto is_score = [](const expression::Node& node) { return node.op == expression::Op::kScore; };
  KP_CHECK(std::ranges::none_of(mods.mask_mod->nodes, is_score), op,
           ": mask_mod reads the score; it decides by batch, head, query and key alone");
}

void Check::check_block_list(std::string_view name, const TensorView& counts, const TensorView& blocks, int64_t rows,
                             int64_t columns) const {
  KP_CHECK(counts.is_present() == blocks.is_present(), op, ": of ", name,
           " blocks one of counts and indices is given; they go together");
  if (!counts.is_present()) return;
  check_present(name, counts);
  check_present(name, blocks);
  KP_CHECK(counts.dtype == DType::kInt32 && blocks.dtype == DType::kInt32, op, ": counts of ", name, " blocks are ",
           counts.dtype, ", indices are ", blocks.dtype, "; both must be int32");
  KP_CHECK(counts.rank == 3 && blocks.rank == 4 && std::ranges::equal(counts.shape(), blocks.shape().first(3)), op,
           ": counts of ", name, " blocks have shape ", shape_text(counts.shape()), ", indices ",
           shape_text(blocks.shape()), "; they must be [batch, heads, rows] and [batch, heads, rows, n]");
  const bool is_broadcast_well = (counts.size(0) == sizes.sequences || counts.size(0) == 1) &&
                                 (counts.size(1) == sizes.heads || counts.size(1) == 1) && counts.size(2) == rows;
  KP_CHECK(is_broadcast_well, op, ": counts of ", name, " blocks have shape ", shape_text(counts.shape()),
           "; it must be ", shape_text(std::array{sizes.sequences, sizes.heads, rows}),
           ", where batch and heads may be 1");
  KP_CHECK(blocks.size(3) <= columns, op, ": ", name, " blocks list up to ", blocks.size(3), " of a row, there are ",
           columns, "; cut them off");
  check_contiguous(name, counts);
  check_contiguous(name, blocks);
}

void Check::check_blocks(bool is_backward) const {
  const BlockList& list = scoring.block_list;
  if (!list.is_present() && !list.key_counts.is_present()) return;
  KP_CHECK(list.query_block > 0 && list.key_block > 0, op, ": blocks are ", list.query_block, " by ", list.key_block,
           "; both sizes must be positive");
  KP_CHECK(list.key_counts.is_present(), op, ": the list of key blocks is missing");
  KP_CHECK(list.query_counts.is_present() || !is_backward, op,
           ": the list of query blocks is missing; the gradients need both directions");
  KP_CHECK(!list.query_counts.is_present() || list.full_key_counts.is_present() == list.full_query_counts.is_present(),
           op, ": full blocks are given in one direction; give both or neither");
  const auto blocks_of = [](int64_t count, int64_t block) { return count / block + (count % block != 0); };
  const int64_t rows = blocks_of(sizes.longest_query, list.query_block);
  const int64_t columns = blocks_of(sizes.longest_key, list.key_block);
  check_block_list("key", list.key_counts, list.key_blocks, rows, columns);
  check_block_list("full key", list.full_key_counts, list.full_key_blocks, rows, columns);
  check_block_list("query", list.query_counts, list.query_blocks, columns, rows);
  check_block_list("full query", list.full_query_counts, list.full_query_blocks, columns, rows);
}

}  // namespace

void check(const ForwardProblem& arguments, Device device) {
  Check check{.op = "attention", .device = device, .scoring = arguments.scoring};
  check.check_products(arguments.query, arguments.key, arguments.value);
  check.check_packed();
  check.check_part();
  check.check_scoring();
  check.check_blocks(false);
  const Sizes& sizes = check.sizes;
  check.check_rows("output", arguments.output, check.result_type(arguments.output, arguments.accumulate),
                   {sizes.batch, sizes.heads, sizes.queries, sizes.value_size}, "query's with value's size");
  KP_CHECK(arguments.lse.is_present() || !arguments.accumulate, check.op,
           ": the output is to be added to and lse is missing; give what belongs to it, or -inf everywhere");
  check.check_plain("lse", arguments.lse, statistic_type(check.dtype), {sizes.batch, sizes.heads, sizes.queries},
                    "query's without its size");
}

void check(const BackwardProblem& arguments, Device device) {
  const Scoring& scoring = arguments.scoring;
  Check check{.op = "attention backward", .device = device, .scoring = scoring};
  check.check_products(arguments.query, arguments.key, arguments.value);
  check.check_packed();
  check.check_part();
  check.check_scoring();
  check.check_blocks(true);
  const Sizes& sizes = check.sizes;
  const DType number = statistic_type(check.dtype);
  const auto output_shape = {sizes.batch, sizes.heads, sizes.queries, sizes.value_size};
  check.check_rows("grad_output", arguments.grad_output, output_shape, "query's with value's size");
  check.check_rows("output", arguments.output, output_shape, "query's with value's size");
  check.check_present("lse", arguments.lse);
  for (const auto& [name, view] : {std::pair{"lse", &arguments.lse}, {"grad_lse", &arguments.grad_lse}}) {
    check.check_plain(name, *view, number, {sizes.batch, sizes.heads, sizes.queries}, "query's without its size");
  }
  KP_CHECK(!arguments.writes_keys || (arguments.accumulate && !scoring.is_packed()), check.op,
           ": grad_key and grad_value are to be written beside a grad_query that is added to, and ",
           arguments.accumulate ? "sequences are packed" : "it is not", "; leave writes_keys out");
  const DType result = check.result_type(arguments.grad_query, arguments.accumulate);
  check.check_rows("grad_query", arguments.grad_query, result, {sizes.batch, sizes.heads, sizes.queries, sizes.size},
                   "as query");
  check.check_rows("grad_key", arguments.grad_key, result, {sizes.batch, sizes.key_heads, sizes.keys, sizes.size},
                   "as key");
  check.check_rows("grad_value", arguments.grad_value, result,
                   {sizes.batch, sizes.key_heads, sizes.keys, sizes.value_size}, "as value");
  if (const TensorView& grad_bias = arguments.grad_bias; grad_bias.is_present()) {
    const TensorView& bias = scoring.bias;
    KP_CHECK(bias.is_present(), check.op, ": grad_bias is given, bias is not; leave it out");
    // Where there are no scores, strides do not tell what is broadcast: 1 and bias' size are both right, and all zero.
    std::array<int64_t, 4> wanted{};
    for (int i = 0; i < 4; ++i) {
      const bool is_one = bias.element_count() == 0 ? grad_bias.rank == 4 && grad_bias.sizes[i] == 1
                                                    : bias.sizes[i] > 1 && bias.strides[i] == 0;
      wanted[i] = is_one ? 1 : bias.sizes[i];
    }
    check.check_plain("grad_bias", grad_bias, number, {wanted[0], wanted[1], wanted[2], wanted[3]},
                      "bias' sizes, 1 where it is broadcast");
  }
  KP_CHECK(!arguments.grad_sinks.is_present() || scoring.sinks.is_present(), check.op,
           ": grad_sinks is given, sinks are not; leave it out");
  check.check_plain("grad_sinks", arguments.grad_sinks, number, {sizes.heads}, "heads");
  KP_CHECK(arguments.grad_captured.empty() || arguments.grad_captured.size() == scoring.captured.size(), check.op,
           ": there are ", arguments.grad_captured.size(), " gradients of captured tensors, ", scoring.captured.size(),
           " tensors are captured; give one for each, absent where none is wanted");
  for (size_t i = 0; i < arguments.grad_captured.size(); ++i) {
    const TensorView &grad = arguments.grad_captured[i], &captured = scoring.captured[i];
    if (!grad.is_present()) continue;
    check.check_type("the gradient of a captured tensor", grad, number);
    KP_CHECK(std::ranges::equal(grad.shape(), captured.shape()), check.op, ": the gradient of captured tensor ", i,
             " has shape ", shape_text(grad.shape()), ", the tensor has ", shape_text(captured.shape()),
             "; they must be equal");
    check.check_contiguous("the gradient of a captured tensor", grad);
  }
}

void check_offsets(std::string_view op, const Scoring& scoring, const Sizes& sizes, const Context& context) {
  if (!scoring.cu_seqlens_q.is_present()) return;
  const auto check = [&](std::string_view name, const TensorView& offsets, std::string_view tensor, int64_t tokens,
                         int64_t longest, std::string_view longest_name) {
    check_offset_values({.op = op,
                         .name = name,
                         .offsets = offsets,
                         .tensor = tensor,
                         .tokens = tokens,
                         .begins_with_zero = true,
                         .longest = longest,
                         .longest_name = longest_name},
                        context);
  };
  check("cu_seqlens_q", scoring.cu_seqlens_q, "query", sizes.queries, scoring.max_seqlen_q, "max_seqlen_q");
  check("cu_seqlens_k", scoring.cu_seqlens_k, "key", sizes.keys, scoring.max_seqlen_k, "max_seqlen_k");
}

}  // namespace kernel_pytorch::attention
