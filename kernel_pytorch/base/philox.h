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
  // The 16 bits of element `index`, one of the eight of this block.
  KP_SHARED_CODE constexpr uint32_t bits(int index) const { return words[index / 2] >> (index % 2 * 16) & 0xffff; }
};

inline constexpr int kPhiloxElements = 8;  // of a block
inline constexpr int kPhiloxRounds = 7;

// The upper half of a product. NVRTC adds a zero to that of a 64-bit multiplication, an instruction in six of Philox.
KP_SHARED_CODE constexpr uint32_t upper_product(uint32_t a, uint32_t b) {
#ifdef __CUDACC_RTC__
  return __umulhi(a, b);
#else
  return static_cast<uint32_t>(uint64_t{a} * b >> 32);
#endif
}

// What the rounds mix in, which follows from the seed alone: for loops that draw many blocks.
struct PhiloxKeys {
  uint32_t words[kPhiloxRounds][2];
};

KP_SHARED_CODE constexpr PhiloxKeys philox_keys(uint64_t seed) {
  PhiloxKeys keys{};
  uint32_t key0 = static_cast<uint32_t>(seed), key1 = static_cast<uint32_t>(seed >> 32);
  for (auto& words : keys.words) {
    words[0] = key0;
    words[1] = key1;
    key0 += 0x9e3779b9;
    key1 += 0xbb67ae85;
  }
  return keys;
}

KP_SHARED_CODE constexpr PhiloxBlock philox(const PhiloxKeys& keys, uint64_t offset, uint64_t block) {
  constexpr uint32_t kMultiplier0 = 0xd2511f53, kMultiplier1 = 0xcd9e8d57;
  PhiloxBlock state{{static_cast<uint32_t>(block), static_cast<uint32_t>(block >> 32), static_cast<uint32_t>(offset),
                     static_cast<uint32_t>(offset >> 32)}};
  for (const auto& key : keys.words) {
    const uint32_t word0 = state.words[0], word2 = state.words[2];
    state = {{upper_product(kMultiplier1, word2) ^ state.words[1] ^ key[0], kMultiplier1 * word2,
              upper_product(kMultiplier0, word0) ^ state.words[3] ^ key[1], kMultiplier0 * word0}};
  }
  return state;
}

KP_SHARED_CODE constexpr PhiloxBlock philox(uint64_t seed, uint64_t offset, uint64_t block) {
  return philox(philox_keys(seed), offset, block);
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
