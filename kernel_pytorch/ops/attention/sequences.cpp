#include "kernel_pytorch/ops/attention/sequences.h"

#include <algorithm>

#include "kernel_pytorch/ops/attention/cuda/alignment_cuda.h"

namespace kernel_pytorch::attention {
namespace {

struct Stretch {
  int64_t first = 0, count = 0;
};

Stretch stretch_of(const TensorView& offsets, int64_t index, int64_t tokens) {
  const int32_t* at = offsets.as<const int32_t>() + index;
  const int64_t first = std::clamp<int64_t>(at[0], 0, tokens);
  return {first, std::clamp<int64_t>(at[1], first, tokens) - first};
}

}  // namespace

std::vector<Sequence> sequences_of(const Sizes& sizes, const Scoring& scoring) {
  std::vector<Sequence> sequences;
  sequences.reserve(static_cast<size_t>(sizes.sequences));
  for (int64_t i = 0; i < sizes.sequences; ++i) {
    Stretch queries{0, sizes.queries}, keys{0, sizes.keys};
    if (scoring.is_packed()) {
      queries = stretch_of(scoring.cu_seqlens_q, i, sizes.queries);
      keys = stretch_of(scoring.cu_seqlens_k, i, sizes.keys);
    }
    int64_t length = keys.count;
    if (scoring.key_lengths.is_present()) {
      length = std::clamp<int64_t>(scoring.key_lengths.as<const int32_t>()[i], 0, keys.count);
    }
    sequences.push_back({.index = i,
                         .batch = scoring.is_packed() ? 0 : i,
                         .first_query = queries.first,
                         .queries = queries.count,
                         .first_key = keys.first,
                         .keys = length,
                         .key_rows = keys.count,
                         .offset = scoring.offset().value_or(aligned_offset(queries.count, keys.count, length))});
  }
  return sequences;
}

}  // namespace kernel_pytorch::attention
