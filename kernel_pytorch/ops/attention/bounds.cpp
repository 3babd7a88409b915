#include "kernel_pytorch/ops/attention/bounds.h"

#include <algorithm>

namespace kernel_pytorch::attention {
namespace {

using Wide = __int128;  // holds every sum of a few 64-bit numbers

constexpr int64_t kFar = int64_t{1} << 28;         // four of them add up in 32 bits
constexpr int64_t kExactFloat = int64_t{1} << 24;  // whole numbers up to it are fp32 numbers
constexpr int64_t kBlockStep = 1024;               // a multiple of the tiles of kernels

bool is_near(int64_t number) {
  return number >= -kFar && number <= kFar;
}

// A block that holds every place of a sequence may as well end with it. Its size is the next multiple of kBlockStep.
int64_t largest_block(int64_t longest) {
  return (longest / kBlockStep + 1) * kBlockStep;
}

Wide wide_offset(const Scoring& scoring) {
  return Wide{*scoring.causal_offset} + scoring.first_query - scoring.first_key;
}

bool counts_places(const Scoring& scoring) {
  return scoring.dropout_p > 0 || !scoring.score_mod.empty() || !scoring.mask_mod.empty();
}

}  // namespace

bool has_near_numbers(const Scoring& scoring, const Sizes& sizes) {
  const BlockList& blocks = scoring.block_list;
  return is_near(scoring.causal_offset.value_or(0)) && is_near(scoring.window_left) && is_near(scoring.window_right) &&
         is_near(scoring.first_query) && is_near(scoring.first_key) &&
         blocks.query_block <= largest_block(sizes.longest_query) &&
         blocks.key_block <= largest_block(sizes.longest_key);
}

void bound_numbers(Scoring& scoring, const Sizes& sizes) {
  scoring.block_list.query_block = std::min(scoring.block_list.query_block, largest_block(sizes.longest_query));
  scoring.block_list.key_block = std::min(scoring.block_list.key_block, largest_block(sizes.longest_key));
  const int64_t queries = sizes.longest_query, keys = sizes.longest_key;
  if (!scoring.causal_offset.has_value()) {  // aligned: no two places are further apart than this
    scoring.window_left = std::min(scoring.window_left, queries + keys);
    scoring.window_right = std::min(scoring.window_right, queries + keys);
    return;
  }
  // -queries < key - query < keys, so that a bound on either side of this range is as good as its end.
  const auto bounded = [&](Wide distance) {
    return static_cast<int64_t>(std::clamp(distance, -Wide{queries}, Wide{keys}));
  };
  const Wide exact = wide_offset(scoring);
  const int64_t offset = bounded(exact);
  if (scoring.window_left >= 0) scoring.window_left = offset - bounded(exact - scoring.window_left);
  if (scoring.window_right >= 0) scoring.window_right = bounded(exact + scoring.window_right) - offset;
  if (!counts_places(scoring)) scoring.first_query = scoring.first_key = 0;
  scoring.causal_offset = offset - scoring.first_query + scoring.first_key;
}

bool is_beyond_alibi(const Scoring& scoring) {
  if (!scoring.causal_offset.has_value()) return false;
  const Wide offset = wide_offset(scoring);
  return offset < -kExactFloat || offset > kExactFloat;
}

}  // namespace kernel_pytorch::attention
