// Which probabilities dropout keeps, for host and device: bits that depend on batch, head, query and key alone.
//
// A 16x16 square of scores holds 4x4 blocks, one call of Philox each: query and key indices v = 8 h + 2 i + b of the
// square (h, b in {0, 1}) with the same i share a block, and h and b say which of its 4x4 bytes. A thread of the tensor
// cores' accumulator layout holds half of a block whether the scores are computed as Q K^T or as K Q^T, so a forward
// and a backward draw one call per eight scores. Offsets of calls must differ modulo 2^32. A byte makes p count in
// steps of 1/256; what is kept is divided by the probability of keeping it after that rounding, so the expectation is
// exact.
#pragma once

#include "kernel_pytorch/base/philox.h"

namespace kernel_pytorch::attention {

// Random numbers of block (query / 16 * 4 + i of query, key / 16 * 4 + i of key) of a head; `head` counts batch * heads
// + head.
KP_SHARED_CODE constexpr PhiloxBlock dropout_block(uint64_t seed, uint64_t offset, uint32_t head, uint32_t query_block,
                                                   uint32_t key_block) {
  return philox(seed, offset + (uint64_t{head} << 32), uint64_t{query_block} << 32 | key_block);
}
KP_SHARED_CODE constexpr uint32_t dropout_block_index(uint32_t index) {
  return index / 16 * 4 + index % 8 / 2;
}
// The position of an index in its block: 0 to 3.
KP_SHARED_CODE constexpr uint32_t dropout_place(uint32_t index) {
  return index % 16 / 8 * 2 + index % 2;
}
KP_SHARED_CODE constexpr uint32_t dropout_byte(const PhiloxBlock& block, uint32_t query_place, uint32_t key_place) {
  return block.words[query_place] >> (key_place * 8) & 0xff;
}

// Kept where the byte is at least this.
KP_SHARED_CODE constexpr uint32_t dropout_byte_threshold(double probability) {
  return static_cast<uint32_t>(probability * 256 + 0.5);
}
KP_SHARED_CODE constexpr float dropout_byte_scale(double probability) {
  const uint32_t threshold = dropout_byte_threshold(probability);
  return threshold >= 256 ? 0.0f : 256.0f / static_cast<float>(256 - threshold);
}

}  // namespace kernel_pytorch::attention
