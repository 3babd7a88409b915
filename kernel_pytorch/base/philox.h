// Philox 4x32-7 (Salmon et al., 2011), for host and device: random bits that depend on nothing but their place, so that
// a backward draws its forward's bits again and a CPU draws a GPU's. Seven rounds are the fewest that its authors found
// to pass every test of BigCrush; ten, their margin of safety, would cost a fused dropout a tenth of its speed.
//
// Layout, part of every op's contract that names it: the key is the seed; the counter is {block, offset}, 64 bits each,
// low words first. An element takes 16 bits: element i those of half i % 2 (low half first) of word i / 2 % 4 of block
// i / 8. A call has one offset, so calls that share a seed are independent where their offsets differ.
#pragma once

#include "kernel_pytorch/base/fixed_width.h"

namespace kernel_pytorch {

struct PhiloxBlock {
  uint32_t words[4];
  // Of the `index`-th of the eight elements of this block.
  KP_SHARED_CODE constexpr uint32_t bits(int index) const { return words[index / 2] >> (index % 2 * 16) & 0xffff; }
};

inline constexpr int kPhiloxElements = 8;  // of a block
inline constexpr int kPhiloxRounds = 7;

KP_SHARED_CODE constexpr PhiloxBlock philox(uint64_t seed, uint64_t offset, uint64_t block) {
  uint32_t key0 = static_cast<uint32_t>(seed), key1 = static_cast<uint32_t>(seed >> 32);
  PhiloxBlock state{{static_cast<uint32_t>(block), static_cast<uint32_t>(block >> 32), static_cast<uint32_t>(offset),
                     static_cast<uint32_t>(offset >> 32)}};
  for (int round = 0; round < kPhiloxRounds; ++round) {
    const uint64_t product0 = uint64_t{0xd2511f53} * state.words[0];
    const uint64_t product1 = uint64_t{0xcd9e8d57} * state.words[2];
    state = {{static_cast<uint32_t>(product1 >> 32) ^ state.words[1] ^ key0, static_cast<uint32_t>(product1),
              static_cast<uint32_t>(product0 >> 32) ^ state.words[3] ^ key1, static_cast<uint32_t>(product0)}};
    key0 += 0x9e3779b9;
    key1 += 0xbb67ae85;
  }
  return state;
}

// Dropout keeps an element whose 16 bits are at least this, so p counts in steps of 1/65536. What is kept is divided by
// the probability of keeping it after that rounding (dropout_scale): the expectation is exact.
KP_SHARED_CODE constexpr uint32_t dropout_threshold(double probability) {
  return static_cast<uint32_t>(probability * 65536 + 0.5);
}
KP_SHARED_CODE constexpr float dropout_scale(double probability) {
  const uint32_t threshold = dropout_threshold(probability);
  return threshold >= 65536 ? 0.0f : static_cast<float>(65536.0 / (65536 - threshold));
}

}  // namespace kernel_pytorch
