// cpu_decode: few queries over many keys, as attention over pages: a sequence's keys are one page. That kernel goes by
// key heads, so that the query heads of a group read a key once, in its own type and without packing it first.
#include <algorithm>
#include <vector>

#include "kernel_pytorch/ops/attention/cpu/kernels.h"
#include "kernel_pytorch/ops/attention/operation.h"
#include "kernel_pytorch/ops/paged_attention/paged_attention.h"
#include "kernel_pytorch/ops/support/cpu_support.h"

namespace kernel_pytorch::attention {
namespace {

constexpr int64_t kMostRows = 64;     // queries times the heads of a group
constexpr int64_t kMostQueries = 15;  // more fill tiles, which then multiply faster
constexpr const char* kManyQueries =
    "is for up to 15 queries and up to 64 rows of the heads that share keys, and some keys";
constexpr const char* kOtherScores =
    "takes causal, windows, ALiBi of one slope a head, softcap, sinks and key_lengths, of sequences that are not "
    "packed";
constexpr const char* kOtherPlaces = "aligns queries with the last keys; causal_offset asks for other places";
constexpr const char* kOtherTypes = "takes one dense last dimension and one type, which its output has too";
constexpr const char* kInvariant =
    "sums keys in another order than the kernel of many queries; with batch_invariant a row's bits do not depend on "
    "how many there are";

bool is_dense(const TensorView& view) {
  return view.sizes[3] <= 1 || view.strides[3] == 1;
}
bool has_plain_scores(const Scoring& scoring, const Sizes& sizes) {
  const bool has_slopes =
      !scoring.alibi_slopes.is_present() || ((scoring.alibi_slopes.strides[0] == 0 || sizes.batch == 1) &&
                                             (scoring.alibi_slopes.strides[1] == 1 || sizes.heads == 1));
  const bool caps_slopes = scoring.softcap > 0 && scoring.softcap_after_bias && scoring.alibi_slopes.is_present();
  return has_slopes && !caps_slopes && !scoring.is_packed() && !scoring.is_part() && !scoring.bias.is_present() &&
         !scoring.mask.is_present() && !scoring.query_segment_ids.is_present() && !scoring.block_list.is_present() &&
         scoring.dropout_p == 0 && scoring.score_mod.empty() && scoring.mask_mod.empty();
}
// Whether the place of a query matters.
bool asks_places(const Scoring& scoring) {
  return scoring.causal || scoring.has_window() || scoring.alibi_slopes.is_present();
}

registry::Support supports(const ForwardProblem& problem, const DeviceInfo& device) {
  const DType dtype = problem.query.dtype;
  if (const char* obstacle = cpu_obstacle(dtype, device)) return registry::Support::no(obstacle);
  const Sizes sizes = sizes_of(problem);
  if (sizes.queries > kMostQueries || sizes.queries * sizes.group() > kMostRows || sizes.batch == 0 ||
      sizes.queries == 0 || sizes.keys == 0 || sizes.key_heads == 0 || sizes.keys >= int64_t{1} << 31) {
    return registry::Support::no(kManyQueries);
  }
  if (problem.scoring.batch_invariant) return registry::Support::no(kInvariant);
  if (!has_plain_scores(problem.scoring, sizes)) return registry::Support::no(kOtherScores);
  if (asks_places(problem.scoring) && problem.scoring.causal_offset.has_value()) {
    return registry::Support::no(kOtherPlaces);
  }
  const bool is_plain = problem.key.dtype == dtype && problem.value.dtype == dtype && problem.output.dtype == dtype &&
                        !problem.accumulate && is_dense(problem.query) && is_dense(problem.key) &&
                        is_dense(problem.value) && is_dense(problem.output);
  return registry::Support::unless(is_plain ? nullptr : kOtherTypes);
}

// [batch, heads, sequence, size] of some sequences as [tokens, heads, size].
TensorView tokens_of(TensorView view, int64_t first, int64_t sequences) {
  view.data = view.as<char>() + first * view.strides[0] * size_of(view.dtype);
  const int64_t stride = view.sizes[2] == 1 ? view.strides[0] : view.strides[2];
  view.rank = 3;
  view.sizes = {sequences * view.sizes[2], view.sizes[1], view.sizes[3]};
  view.strides = {stride, view.strides[1], view.strides[3]};
  return view;
}
bool are_tokens(const TensorView& view) {  // of all sequences, one stride apart
  return view.sizes[0] == 1 || view.sizes[2] == 1 || view.strides[0] == view.sizes[2] * view.strides[2];
}
// ... as [pages, page_size, heads, size].
TensorView pages_of(TensorView view, int64_t first, int64_t sequences) {
  view.data = view.as<char>() + first * view.strides[0] * size_of(view.dtype);
  std::swap(view.sizes[1], view.sizes[2]);
  std::swap(view.strides[1], view.strides[2]);
  view.sizes[0] = sequences;
  return view;
}

// How many keys of a sequence there are.
int64_t length_of(const ForwardProblem& problem, int64_t sequence) {
  const int64_t keys = problem.key.sizes[2];
  if (!problem.scoring.key_lengths.is_present()) return keys;
  return std::clamp<int64_t>(problem.scoring.key_lengths.as<const int32_t>()[sequence], 0, keys);
}
// Fewer keys than queries do not move the queries to the left of the first key (aligned_offset), which pages would do.
bool is_short(const ForwardProblem& problem, int64_t sequence) {
  const int64_t least = std::min(problem.query.sizes[2], problem.key.sizes[2]);
  return asks_places(problem.scoring) && length_of(problem, sequence) < least;
}

void run_sequences(const ForwardProblem& problem, int64_t first, int64_t count, Context& context) {
  const Sizes sizes = sizes_of(problem);
  const Scoring& scoring = problem.scoring;
  const Device device = problem.query.device;
  std::vector<int32_t> tables, lengths;
  TensorView keys = pages_of(problem.key, first, count), values = pages_of(problem.value, first, count);
  if (is_short(problem, first)) {  // one sequence: a page is a key, and those behind its length are none
    lengths.push_back(static_cast<int32_t>(std::min(sizes.queries, sizes.keys)));
    for (int32_t i = 0; i < lengths[0]; ++i) tables.push_back(i < length_of(problem, first) ? i : -1);
    for (TensorView* view : {&keys, &values}) {
      std::swap(view->sizes[0], view->sizes[1]);
      std::swap(view->strides[0], view->strides[1]);
    }
  } else {
    for (int64_t i = 0; i < count; ++i) {
      tables.push_back(static_cast<int32_t>(i));
      lengths.push_back(static_cast<int32_t>(length_of(problem, first + i)));
    }
  }
  const auto columns = static_cast<int64_t>(tables.size()) / count;
  paged_attention::Attend attend{
      .query = tokens_of(problem.query, first, count),
      .key_cache = keys,
      .value_cache = values,
      .block_tables = contiguous_view(tables.data(), DType::kInt32, {count, columns}, device),
      .seq_lens = contiguous_view(lengths.data(), DType::kInt32, {count}, device),
      .sinks = scoring.sinks,
      .causal = scoring.causal,
      .scale = scoring.scale,
      .softcap = scoring.softcap,
      .window_left = scoring.window_left,
      .window_right = scoring.window_right,
      .output = tokens_of(problem.output, first, count)};
  if (scoring.alibi_slopes.is_present()) {
    attend.alibi_slopes = contiguous_view(const_cast<float*>(scoring.alibi_slopes.as<const float>()), DType::kFloat32,
                                          {sizes.heads}, device);
  }
  const int64_t tokens = count * sizes.queries;
  std::vector<float> lse(static_cast<size_t>(problem.lse.is_present() ? sizes.heads * tokens : 0));
  if (!lse.empty()) attend.lse = contiguous_view(lse.data(), DType::kFloat32, {sizes.heads, tokens}, device);
  paged_attention::attend(attend, context);
  for (int64_t i = 0; i < static_cast<int64_t>(lse.size());
       ++i) {  // [heads, batch, queries] -> [batch, heads, queries]
    const int64_t head = i / tokens, sequence = first + i % tokens / sizes.queries, query = i % sizes.queries;
    problem.lse.as<float>()[(sequence * sizes.heads + head) * sizes.queries + query] = lse[static_cast<size_t>(i)];
  }
}

void run(const ForwardProblem& problem, int, Context& context) {
  Context inner = context;
  inner.kernel_override = {};
  const int64_t batch = problem.query.sizes[0];
  bool are_alike = are_tokens(problem.query) && are_tokens(problem.output);
  for (int64_t i = 0; i < batch; ++i) are_alike = are_alike && !is_short(problem, i);
  if (are_alike) return run_sequences(problem, 0, batch, inner);
  for (int64_t i = 0; i < batch; ++i) run_sequences(problem, i, 1, inner);
}

}  // namespace

constinit const registry::Kernel<ForwardProblem> kForwardCpuDecode{
    .name = "cpu_decode", .supports = supports, .run = run};

}  // namespace kernel_pytorch::attention
