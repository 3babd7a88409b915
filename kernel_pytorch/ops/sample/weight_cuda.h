// The arithmetic of one token, for host and device: every operation is exact or rounded once, so that all kernels give
// the same bits. Weights are integers of at most 36 bits: 2^20 of them add up in 64 bits, and 12 bits of each of 2^20
// add up in 32, which is how the GPU's histogram adds them. Functions are static: each instruction level has its own.
#pragma once

#include "kernel_pytorch/base/fixed_width.h"

namespace kernel_pytorch::sample {

inline constexpr int kWeightBits = 36;
inline constexpr uint64_t kMostWeight = (uint64_t{1} << kWeightBits) - 1;
inline constexpr float kLeastTemperature = 1e-30f, kMostTemperature = 1e30f;
inline constexpr float kLargestFinite = 0x1.fffffep127f;
// Octaves below the largest logit from which on weights are 0.
inline constexpr float kOctaves = kWeightBits + 1;

KP_SHARED_CODE static inline float fma_once(float a, float b, float c) {
#ifdef __CUDACC_RTC__
  return __fmaf_rn(a, b, c);
#else
  return __builtin_fmaf(a, b, c);
#endif
}
KP_SHARED_CODE static inline float divide_once(float a, float b) {
#ifdef __CUDACC_RTC__
  return __fdiv_rn(a, b);
#else
  return a / b;
#endif
}
KP_SHARED_CODE static inline uint64_t upper_product(uint64_t a, uint64_t b) {
#ifdef __CUDACC_RTC__
  return __umul64hi(a, b);
#else
  return static_cast<uint64_t>(static_cast<unsigned __int128>(a) * b >> 64);
#endif
}

// Floats as unsigned integers of the same order, both zeros as one; NaN and -inf are 0, +inf the largest number's.
KP_SHARED_CODE static inline uint32_t key_of(float value) {
  const float number = (value > kLargestFinite ? kLargestFinite : value) + 0.0f;
  const uint32_t bits = __builtin_bit_cast(uint32_t, number);
  const uint32_t key = bits ^ (static_cast<uint32_t>(static_cast<int32_t>(bits) >> 31) | 0x80000000u);
  return number >= -kLargestFinite ? key : 0;
}
KP_SHARED_CODE static inline float value_of_key(uint32_t key) {
  return __builtin_bit_cast(float, key ^ ((key & 0x80000000u) != 0 ? 0x80000000u : 0xffffffffu));
}

// What the tokens of a row share.
struct Scale {
  float largest;  // logit
  float octaves;  // of a logit of 1
  float lowest;   // differences to the largest below this have no weight
};
KP_SHARED_CODE static inline Scale scale_of(float largest, float temperature) {
  const float bounded = temperature > kMostTemperature ? kMostTemperature : temperature;
  const float octaves = divide_once(1.44269504f, bounded);
  return {largest, octaves, -divide_once(kOctaves, octaves)};
}
// Keys below this have no weight.
KP_SHARED_CODE static inline uint32_t least_key(const Scale& scale) {
  const float least = scale.largest + scale.lowest * 1.01f;
  return key_of(least >= -kLargestFinite ? least : -kLargestFinite);
}

// 2^f for f in [-1/2, 1/2], error 2^-23.
KP_SHARED_CODE static inline float exp2_of(float f) {
  float p = 1.5353362e-4f;
  p = fma_once(p, f, 1.3398874e-3f);
  p = fma_once(p, f, 9.6184373e-3f);
  p = fma_once(p, f, 5.5503324e-2f);
  p = fma_once(p, f, 2.4022648e-1f);
  p = fma_once(p, f, 6.9314720e-1f);
  return fma_once(p, f, 1.0f);
}
// Of a finite logit; the sum with `kRounder` has the nearest integer in its lowest bits.
KP_SHARED_CODE static inline uint64_t weight_of(const Scale& scale, float logit) {
  constexpr float kRounder = 0x1.8p23f;
  const float difference = (logit > kLargestFinite ? kLargestFinite : logit) - scale.largest;
  if (!(difference >= scale.lowest)) return 0;
  const float sum = fma_once(difference, scale.octaves, kRounder);
  const float whole = sum - kRounder;
  const float power = exp2_of(fma_once(difference, scale.octaves, -whole));
  const uint64_t mantissa = static_cast<uint64_t>(static_cast<uint32_t>(power * 0x1p24f));
  const int shift = kWeightBits - 24 + static_cast<int>(whole);
  const uint64_t weight = shift >= 0 ? mantissa << shift : shift > -32 ? mantissa >> -shift : 0;
  return weight < kMostWeight ? weight : kMostWeight;
}

// The weights of larger logits that end top-p: at least 1, so that the largest stays.
KP_SHARED_CODE static inline uint64_t goal_of(float top_p, uint64_t total) {
  const auto steps = static_cast<uint64_t>(top_p * 0x1p24f);  // exact but for what is below 2^-24
  const uint64_t goal = upper_product(total, steps << 40);
  return goal > 0 ? goal : 1;
}
KP_SHARED_CODE static inline bool limits_p(float top_p) {
  return top_p >= 0.0f && top_p < 1.0f;
}
KP_SHARED_CODE static inline uint64_t least_weight(float min_p) {
  if (!(min_p > 0.0f)) return 1;
  const auto least = min_p < 1.0f ? static_cast<uint64_t>(min_p * 0x1p36f) : kMostWeight;
  return least > 0 ? least : 1;
}

}  // namespace kernel_pytorch::sample
