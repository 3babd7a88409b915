#include "kernel_pytorch/registry/random_fill.h"

#include <algorithm>
#include <cmath>

#include "kernel_pytorch/base/float_types.h"
#include "kernel_pytorch/device/parallel.h"

namespace kernel_pytorch::registry {
namespace {

constexpr int64_t kChunk = 1 << 16;

// SplitMix64: each index has its own number, so threads need no state.
uint64_t random_bits(uint64_t seed, int64_t index) {
  uint64_t z = seed + static_cast<uint64_t>(index + 1) * 0x9e3779b97f4a7c15;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9;
  z = (z ^ (z >> 27)) * 0x94d049bb133111eb;
  return z ^ (z >> 31);
}

float normal_from(uint64_t bits) {
  const float sum = static_cast<float>((bits & 0xffff) + (bits >> 16 & 0xffff) + (bits >> 32 & 0xffff) + (bits >> 48));
  constexpr float kMean = 2 * 65535.0f;
  constexpr float kDeviation = 37836.9f;  // sqrt(4 / 12) * 65536
  return (sum - kMean) / kDeviation;
}

int64_t integer_at(const Filling& filling, uint64_t seed, int64_t index, int64_t elements) {
  const uint64_t bits = random_bits(seed, index);
  const auto limit = static_cast<uint64_t>(std::max<int64_t>(filling.limit, 1));
  switch (filling.content) {
    case Content::kSeeds:
      return static_cast<int64_t>(bits);
    case Content::kPlaces: {  // first | second << 2 for each four bits, of the six pairs
      constexpr uint32_t kPairs[] = {4, 8, 9, 12, 13, 14};
      uint32_t word = 0;
      for (int i = 0; i < 8; ++i) word |= kPairs[(bits >> 8 * i & 0xff) % 6] << 4 * i;
      return static_cast<int32_t>(word);
    }
    case Content::kOffsets: {  // even steps, each moved by less than half of one, the ends kept
      const int64_t steps = std::max<int64_t>(elements - 1, 1);
      const int64_t step = filling.limit / steps;
      const int64_t moved = index == 0 || index >= steps ? 0 : static_cast<int64_t>(bits % (step / 2 + 1));
      return index >= steps ? filling.limit : index * step + moved;
    }
    default:
      return static_cast<int64_t>(bits % limit);
  }
}

template <class T, class Make>
void fill_as(void* data, int64_t elements, Threads* threads, const Make& make) {
  T* target = static_cast<T*>(data);
  parallel_for(threads, (elements + kChunk - 1) / kChunk, [&](int64_t chunk) {
    const int64_t end = std::min(elements, (chunk + 1) * kChunk);
    for (int64_t i = chunk * kChunk; i < end; ++i) target[i] = make(i);
  });
}

}  // namespace

void fill_random(void* data, DType dtype, int64_t elements, const Filling& filling, uint64_t seed, Threads* threads) {
  const bool is_positive = filling.content == Content::kPositive;
  const auto real = [=](int64_t i) {
    const float value = normal_from(random_bits(seed, i));
    return is_positive ? std::fabs(value) + 0.5f : value;
  };
  const auto whole = [=](int64_t i) { return integer_at(filling, seed, i, elements); };
  switch (dtype) {
    case DType::kFloat32:
      return fill_as<float>(data, elements, threads, real);
    case DType::kFloat64:
      return fill_as<double>(data, elements, threads, real);
    case DType::kBFloat16:
      return fill_as<BFloat16>(data, elements, threads, [&](int64_t i) { return from_float<BFloat16>(real(i)); });
    case DType::kFloat16:
      return fill_as<Float16>(data, elements, threads, [&](int64_t i) { return from_float<Float16>(real(i)); });
    case DType::kFloat8E4M3:
      return fill_as<Float8E4M3>(data, elements, threads, [&](int64_t i) { return from_float<Float8E4M3>(real(i)); });
    case DType::kFloat8E5M2:
      return fill_as<Float8E5M2>(data, elements, threads, [&](int64_t i) { return from_float<Float8E5M2>(real(i)); });
    case DType::kInt8:
      return fill_as<int8_t>(data, elements, threads, whole);
    case DType::kInt32:
      return fill_as<int32_t>(data, elements, threads, whole);
    case DType::kInt64:
      return fill_as<int64_t>(data, elements, threads, whole);
    case DType::kBool:
      return fill_as<uint8_t>(data, elements, threads, [&](int64_t i) { return static_cast<uint8_t>(whole(i) & 1); });
  }
}

}  // namespace kernel_pytorch::registry
