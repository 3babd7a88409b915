// The list of blocks of one token of one key head, of the compressed branch's probabilities summed over the group: on
// the host, for every type of sums.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "kernel_pytorch/ops/native_sparse_attention/operation.h"

namespace kernel_pytorch::native_sparse_attention {

// importance[0 .. numbers.compressed(place + 1)) -> list[0 .. numbers.blocks), ascending, -1 behind the last.
template <class Number>
void choose_blocks(const Numbers& numbers, const Number* importance, int64_t place, int32_t* list) {
  const int64_t candidates = place / numbers.block_size + 1, wanted = std::min(candidates, numbers.blocks);
  const int64_t compressed = numbers.compressed(place + 1);
  const int64_t spans = numbers.compress_block / numbers.compress_stride;
  const int64_t strides = numbers.block_size / numbers.compress_stride;
  struct Candidate {
    Number score;
    int32_t block;
  };
  std::fill(list, list + numbers.blocks, -1);
  int64_t count = 0;
  const auto is_local = [&](int64_t block) { return block >= candidates - numbers.local_blocks; };
  for (int64_t block = candidates - 1; block >= 0 && is_local(block) && count < wanted; --block) {
    list[count++] = static_cast<int32_t>(block);
  }
  for (int64_t block = 0; block < numbers.first_blocks && block < candidates && count < wanted; ++block) {
    if (!is_local(block)) list[count++] = static_cast<int32_t>(block);
  }
  if (count < wanted) {
    std::vector<Candidate> others;
    for (int64_t block = numbers.first_blocks; block < candidates && !is_local(block); ++block) {
      Number score = 0;
      for (int64_t stride = block * strides; stride < (block + 1) * strides; ++stride) {
        for (int64_t c = std::max<int64_t>(stride - spans + 1, 0); c <= stride && c < compressed; ++c) {
          score += importance[c];
        }
      }
      others.push_back({score, static_cast<int32_t>(block)});
    }
    const auto goes_first = [](const Candidate& a, const Candidate& b) {
      const bool a_is_nan = a.score != a.score, b_is_nan = b.score != b.score;
      if (a_is_nan != b_is_nan) return b_is_nan;
      return !a_is_nan && a.score != b.score ? a.score > b.score : a.block < b.block;
    };
    const int64_t picked = std::min<int64_t>(wanted - count, static_cast<int64_t>(others.size()));
    if (picked < static_cast<int64_t>(others.size())) {
      std::nth_element(others.begin(), others.begin() + picked, others.end(), goes_first);
    }
    for (int64_t i = 0; i < picked; ++i) list[count++] = others[static_cast<size_t>(i)].block;
  }
  std::sort(list, list + count);
}

}  // namespace kernel_pytorch::native_sparse_attention
