// The 256 values of bitsandbytes' dynamic map, and how a number finds the nearest one without a search. The map holds
// 0, 1 and, for each of seven powers of ten, the middles of equal parts of (0.1, 1) times that power: 1, 2, 4 ... 64 of
// them with either sign, or 2, 4, 8 ... 128 without. Values are taken by rank, the order of magnitudes: the code of the
// signed map is 127 + rank, or 127 - rank below zero, of the other one the rank.
#pragma once

#include "kernel_pytorch/ops/optimizer_step/format_cuda.h"

namespace kernel_pytorch::optimizer_step {

inline constexpr int kSignedZero = 127;  // the signed code of 0

// Buckets of numbers whose upper 16 bits agree, from 2^-23 to 1: narrower than the distance of two values, so that a
// number's rank is that of its bucket's beginning or the next.
inline constexpr int kFirstBucket = (127 - 23) * 128;
inline constexpr int kBuckets = 23 * 128 + 1;

template <bool kSigned>
struct DynamicMap {
  static constexpr int kRanks = kSigned ? 129 : 256;
  float magnitudes[kRanks];
  float middles[kRanks];  // between a rank and the next; the last one is above everything
  uint8_t starts[kBuckets];
};

constexpr double bucket_begin(int bucket) {
  const int exponent = bucket / 128;
  double value = 0x1p-23 * (1 + bucket % 128 / 128.0);
  for (int i = 0; i < exponent; ++i) value *= 2;
  return value;
}

template <bool kSigned>
constexpr DynamicMap<kSigned> make_dynamic_map() {
  constexpr int kRanks = DynamicMap<kSigned>::kRanks;
  DynamicMap<kSigned> map{};
  int rank = 0;
  map.magnitudes[rank++] = 0;
  double power = 1e-6;
  for (int i = 0, parts = kSigned ? 1 : 2; i < 7; ++i, parts *= 2, power *= 10) {
    for (int part = 0; part < parts; ++part) {
      map.magnitudes[rank++] = static_cast<float>(power * (0.1 + 0.9 * (part + 0.5) / parts));
    }
  }
  map.magnitudes[rank++] = 1;
  for (int i = 0; i + 1 < kRanks; ++i) {
    map.middles[i] = static_cast<float>((static_cast<double>(map.magnitudes[i]) + map.magnitudes[i + 1]) / 2);
  }
  map.middles[kRanks - 1] = 0x1p127f;
  int start = 0;
  for (int bucket = 0; bucket < kBuckets; ++bucket) {
    while (bucket_begin(bucket) > map.middles[start]) ++start;
    map.starts[bucket] = static_cast<uint8_t>(bucket == 0 ? 0 : start);
  }
  return map;
}

// The rank nearest to a magnitude, at most 1 or a rounding above it, whose bits are given too. Signs are random:
// nothing here branches on them.
template <class Map>
KP_STEP_CODE int nearest_rank(const Map& map, float magnitude, uint32_t bits) {
  int bucket = static_cast<int>(bits >> 16) - kFirstBucket;
  bucket = bucket < 0 ? 0 : bucket;
  const int rank = map.starts[bucket < kBuckets ? bucket : kBuckets - 1];
  return rank + static_cast<int>(magnitude > map.middles[rank]);
}

template <class Map>
KP_STEP_CODE uint32_t dynamic_first_code(const Map& map, float scaled, uint32_t bits) {
  const uint32_t magnitude_bits = bits & 0x7fffffffu;
  const float magnitude = __builtin_bit_cast(float, magnitude_bits);
  const int is_negative = static_cast<int>(scaled < 0);
  int rank = nearest_rank(map, magnitude, magnitude_bits);
  rank = rank < is_negative ? is_negative : rank;  // a negative number is not rounded to 0
  rank = rank > 128 - is_negative ? 128 - is_negative : rank;
  return static_cast<uint32_t>(kSignedZero + ((rank ^ -is_negative) + is_negative));
}
template <class Map>
KP_STEP_CODE float dynamic_first(const Map& map, uint32_t code) {
  const int rank = static_cast<int>(code) - kSignedZero, sign = rank >> 31;
  const uint32_t magnitude = __builtin_bit_cast(uint32_t, map.magnitudes[(rank ^ sign) - sign]);
  return __builtin_bit_cast(float, magnitude | (static_cast<uint32_t>(sign) & 0x80000000u));
}

}  // namespace kernel_pytorch::optimizer_step
