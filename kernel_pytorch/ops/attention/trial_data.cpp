// Shrinking a problem of attention and filling its small tensors so that they agree.
#include <algorithm>
#include <cmath>

#include "kernel_pytorch/base/element.h"
#include "kernel_pytorch/base/hash.h"
#include "kernel_pytorch/ops/attention/trial.h"

namespace kernel_pytorch::attention {
namespace {

// What the reference may compute for each element that it was asked to keep to: shrinking bounds its time.
constexpr double kProductsPerElement = 256;

TensorView contiguous_again(const TensorView& view) {
  return view.is_present() ? contiguous_view(view.data, view.dtype, view.shape(), view.device) : view;
}

// Sizes of the smaller problem: one sequence of a batch, one group of heads, and as many places as the budget allows.
Sizes smaller(const Sizes& sizes, bool is_packed, int64_t elements) {
  Sizes small = sizes;
  small.batch = std::min<int64_t>(sizes.batch, 1);
  small.key_heads = std::min<int64_t>(sizes.key_heads, 1);
  small.heads = small.key_heads * sizes.group();
  const double products = static_cast<double>(elements) * kProductsPerElement;
  const double columns = static_cast<double>(std::max<int64_t>((sizes.size + sizes.value_size) / 2, 1) * small.heads);
  const auto most = std::max<int64_t>(1, static_cast<int64_t>(std::sqrt(products / std::max(columns, 1.0))));
  small.queries = std::min(sizes.queries, most);
  small.keys = std::min(sizes.keys, most);
  small.sequences = is_packed ? sizes.sequences : small.batch;
  small.longest_query = is_packed ? std::min(sizes.longest_query, small.queries) : small.queries;
  small.longest_key = is_packed ? std::min(sizes.longest_key, small.keys) : small.keys;
  return small;
}

void cut(TensorView& view, std::initializer_list<int64_t> sizes) {
  if (!view.is_present()) return;
  int i = 0;
  for (int64_t size : sizes) view.sizes[i] = std::min(view.sizes[i], size), ++i;
}

void shrink_scoring(Scoring& scoring, const Sizes& small) {
  for (TensorView* view : {&scoring.bias, &scoring.mask}) {
    cut(*view, {small.sequences, small.heads, small.longest_query, small.longest_key});
  }
  cut(scoring.alibi_slopes, {small.sequences, small.heads});
  cut(scoring.sinks, {small.heads});
  cut(scoring.key_lengths, {small.sequences});
  cut(scoring.query_segment_ids, {small.batch, small.queries});
  cut(scoring.key_segment_ids, {small.batch, small.keys});
  if (scoring.is_packed()) {
    scoring.max_seqlen_q = small.longest_query;
    scoring.max_seqlen_k = small.longest_key;
  }
  BlockList& list = scoring.block_list;
  if (!list.is_present()) return;
  const int64_t rows = (small.longest_query + list.query_block - 1) / list.query_block;
  const int64_t columns = (small.longest_key + list.key_block - 1) / list.key_block;
  for (TensorView* view : {&list.key_counts, &list.key_blocks, &list.full_key_counts, &list.full_key_blocks}) {
    cut(*view, {small.sequences, small.heads, rows});
    if (view->rank == 4) view->sizes[3] = columns;
    *view = contiguous_again(*view);
  }
  for (TensorView* view : {&list.query_counts, &list.query_blocks, &list.full_query_counts, &list.full_query_blocks}) {
    cut(*view, {small.sequences, small.heads, columns});
    if (view->rank == 4) view->sizes[3] = rows;
    *view = contiguous_again(*view);
  }
}

template <class Each>
void for_each_offset(const TensorView& view, const Each& each) {
  std::array<int64_t, kMaxRank> index{};
  for (int64_t left = view.element_count(); left > 0; --left) {
    int64_t offset = 0;
    for (int i = 0; i < view.rank; ++i) offset += index[i] * view.strides[i];
    each(offset);
    for (int i = view.rank - 1; i >= 0 && ++index[i] == view.sizes[i]; --i) index[i] = 0;
  }
}

uint64_t mix(std::initializer_list<int64_t> values) {
  HashMixer mixer;
  for (int64_t value : values) mixer.add(static_cast<uint64_t>(value));
  return mixer.value() >> 17;
}

// Sequences between half of the bound and the bound, every fifth one empty; some tokens past the last are left over.
void set_trial_offsets(const TensorView& offsets, int64_t tokens, int64_t longest, int64_t salt) {
  if (!offsets.is_present()) return;
  const int64_t sequences = offsets.sizes[0] - 1;
  const int64_t most = std::min(longest, tokens / std::max<int64_t>(sequences, 1));
  int32_t at = 0;
  for (int64_t i = 0; i <= sequences; ++i) {
    offsets.as<int32_t>()[i] = at;
    const bool is_empty = i % 5 == 3;
    if (!is_empty) at += static_cast<int32_t>(most - static_cast<int64_t>(mix({salt, i}) % (most / 2 + 1)));
  }
}

enum class Tile : uint8_t { kEmpty, kPartial, kFull };

// Lists the tiles of one direction: `tile_at(batch, head, row, column)`.
template <class TileAt>
void list_tiles(const TensorView& counts, const TensorView& blocks, Tile wanted, const TileAt& tile_at) {
  if (!counts.is_present()) return;
  const int64_t rows = counts.sizes[2], most = blocks.sizes[3];
  for (int64_t batch = 0; batch < counts.sizes[0]; ++batch) {
    for (int64_t head = 0; head < counts.sizes[1]; ++head) {
      for (int64_t row = 0; row < rows; ++row) {
        const int64_t place = (batch * counts.sizes[1] + head) * rows + row;
        int32_t count = 0;
        int32_t* list = blocks.as<int32_t>() + place * most;
        std::fill_n(list, most, 0);
        for (int32_t column = 0; column < most; ++column) {
          if (tile_at(batch, head, row, column) == wanted) list[count++] = column;
        }
        counts.as<int32_t>()[place] = count;
      }
    }
  }
}

void set_trial_blocks(const BlockList& list) {
  if (!list.is_present()) return;
  const bool has_full = list.full_key_counts.is_present();
  const auto by_query = [=](int64_t batch, int64_t head, int64_t row, int64_t column) {
    const uint64_t draw = mix({batch, head, row, column}) % 4;
    if (draw == 0) return Tile::kEmpty;
    return draw == 1 && has_full ? Tile::kFull : Tile::kPartial;
  };
  const auto by_key = [=](int64_t batch, int64_t head, int64_t column, int64_t row) {
    return by_query(batch, head, row, column);
  };
  list_tiles(list.key_counts, list.key_blocks, Tile::kPartial, by_query);
  list_tiles(list.full_key_counts, list.full_key_blocks, Tile::kFull, by_query);
  list_tiles(list.query_counts, list.query_blocks, Tile::kPartial, by_key);
  list_tiles(list.full_query_counts, list.full_query_blocks, Tile::kFull, by_key);
}

}  // namespace

ForwardProblem shrink_forward(const ForwardProblem& problem, int64_t elements) {
  const Sizes small = smaller(sizes_of(problem), problem.scoring.is_packed(), elements);
  ForwardProblem result = problem;
  cut(result.query, {small.batch, small.heads, small.queries});
  cut(result.key, {small.batch, small.key_heads, small.keys});
  cut(result.value, {small.batch, small.key_heads, small.keys});
  cut(result.output, {small.batch, small.heads, small.queries});
  cut(result.lse, {small.batch, small.heads, small.queries});
  result.lse = contiguous_again(result.lse);
  shrink_scoring(result.scoring, small);
  return result;
}

BackwardProblem shrink_backward(const BackwardProblem& problem, int64_t elements) {
  const Sizes small = smaller(sizes_of(problem), problem.scoring.is_packed(), elements);
  BackwardProblem result = problem;
  for (TensorView* view : {&result.query, &result.grad_query, &result.output, &result.grad_output}) {
    cut(*view, {small.batch, small.heads, small.queries});
  }
  for (TensorView* view : {&result.key, &result.grad_key, &result.value, &result.grad_value}) {
    cut(*view, {small.batch, small.key_heads, small.keys});
  }
  for (TensorView* view : {&result.lse, &result.grad_lse}) {
    cut(*view, {small.batch, small.heads, small.queries});
    *view = contiguous_again(*view);
  }
  cut(result.grad_bias, {small.sequences, small.heads, small.longest_query, small.longest_key});
  result.grad_bias = contiguous_again(result.grad_bias);
  cut(result.grad_sinks, {small.heads});
  shrink_scoring(result.scoring, small);
  return result;
}

registry::Filling fill_scoring(int64_t keys, std::string_view tensor) {
  using enum registry::Content;
  if (tensor == "seed") return {.content = kSeeds};
  if (tensor == "key_lengths") return {.content = kIndices, .limit = keys + 1};
  if (tensor == "query_segment_ids" || tensor == "key_segment_ids") return {.content = kIndices, .limit = 4};
  if (tensor == "mask") return {.content = kIndices, .limit = 2};
  return {};
}

void set_trial_scoring(const Sizes& sizes, const Scoring& scoring) {
  const TensorView& slopes = scoring.alibi_slopes;
  for_each_offset(slopes, [&](int64_t offset) {  // once, where all sequences share their slopes
    const double slope = std::fabs(load_element(slopes.data, slopes.dtype, offset));
    store_element(slopes.data, slopes.dtype, offset, slope > 0.125 ? slope / 32 : slope);
  });
  for (const TensorView* segments : {&scoring.query_segment_ids, &scoring.key_segment_ids}) {
    for_each_offset(*segments, [&](int64_t offset) {
      int32_t& id = segments->as<int32_t>()[offset];
      if (id == 3) id = -1;
    });
  }
  set_trial_offsets(scoring.cu_seqlens_q, sizes.queries, sizes.longest_query, 1);
  set_trial_offsets(scoring.cu_seqlens_k, sizes.keys, sizes.longest_key, 2);
  set_trial_blocks(scoring.block_list);
}

void set_trial_lse(const Sizes& sizes, double scale, const TensorView& lse) {
  const double variance = scale * scale * static_cast<double>(sizes.size);  // of scores
  const double usual = std::log(static_cast<double>(std::max<int64_t>(sizes.longest_key, 1))) + (1 + variance) / 2;
  for_each_offset(lse, [&](int64_t offset) {
    const double noise = load_element(lse.data, lse.dtype, offset);
    store_element(lse.data, lse.dtype, offset, usual + noise / 4);
  });
}

}  // namespace kernel_pytorch::attention
