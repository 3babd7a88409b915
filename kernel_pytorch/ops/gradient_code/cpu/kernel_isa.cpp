// Codes of gradients on the lanes of the CPU, built once per instruction level. A tile's numbers stay in the first
// cache between the search for their scale and the codes.
#include "kernel_pytorch/base/float_types.h"
#include "kernel_pytorch/cpu/load_store.h"
#include "kernel_pytorch/cpu/vec.h"
#include "kernel_pytorch/ops/gradient_code/cpu/tiles.h"

namespace kernel_pytorch::gradient_code::KP_ISA_NAMESPACE {
namespace {

using cpu::kLanes;
using cpu::Vec;
using cpu::VecU;

template <class T>
KP_PRIMITIVE Vec load_from(const T* from, int64_t left) {
  return left >= kLanes ? cpu::load(from) : left > 0 ? cpu::load_partial(from, left) : Vec{};
}
template <class T>
KP_PRIMITIVE void store_to(T* to, Vec value, int64_t left) {
  if (left >= kLanes) return cpu::store(to, value);
  if (left > 0) cpu::store_partial(to, value, left);
}

KP_PRIMITIVE float largest_of(const float* values, int count) {
  VecU most{};
  for (int i = 0; i < count; i += kLanes) most = cpu::max(most, cpu::bits_of(cpu::load(values + i)) & 0x7fffffffu);
  uint32_t bits = 0;
  for (int i = 0; i < kLanes; ++i) bits = most[i] > bits ? most[i] : bits;
  return __builtin_bit_cast(float, bits);
}
KP_PRIMITIVE float mean_magnitude(const float* values) {
  float sums[32];
  for (int k = 0; k < 32; ++k) {
    const auto at = [&](int i) { return __builtin_fabsf(values[i]); };
    const int a = 4 * k, b = 128 + 4 * k;
    sums[k] = ((at(a) + at(a + 1)) + (at(a + 2) + at(a + 3))) + ((at(b) + at(b + 1)) + (at(b + 2) + at(b + 3)));
  }
  for (int half = 16; half > 0; half /= 2) {
    for (int k = 0; k < half; ++k) sums[k] += sums[k + half];
  }
  return sums[0] / 256;
}

// Steps are integers as bytes; of one bit 0 and 1.
template <Code kCode>
KP_PRIMITIVE void pack(const uint8_t* steps, uint8_t* codes) {
  if constexpr (kCode == Code::kInt8) __builtin_memcpy(codes, steps, kTile);
  if constexpr (kCode == Code::kInt4) {
    for (int i = 0; i < kTile / 2; ++i) {
      codes[i] = static_cast<uint8_t>(((steps[2 * i] + 8) & 15) | (steps[2 * i + 1] + 8) << 4);
    }
  }
  if constexpr (kCode == Code::kOneBit) {
    for (int i = 0; i < kTile / 8; ++i) {
      uint64_t eight;
      __builtin_memcpy(&eight, steps + 8 * i, 8);
      codes[i] = static_cast<uint8_t>((eight * 0x0102040810204080u) >> 56);  // byte k to bit 56 + k
    }
  }
}
template <Code kCode>
KP_PRIMITIVE void unpack(const uint8_t* codes, uint8_t* steps) {
  if constexpr (kCode == Code::kInt8) __builtin_memcpy(steps, codes, kTile);
  if constexpr (kCode == Code::kInt4) {
    for (int i = 0; i < kTile / 2; ++i) {
      steps[2 * i] = static_cast<uint8_t>((codes[i] & 15) - 8);
      steps[2 * i + 1] = static_cast<uint8_t>((codes[i] >> 4) - 8);
    }
  }
  if constexpr (kCode == Code::kOneBit) {
    for (int i = 0; i < kTile; ++i) steps[i] = static_cast<uint8_t>((codes[i / 8] >> (i % 8) & 1) * 2 - 1);
  }
}

KP_PRIMITIVE Vec feedback(Vec left, const EncodeTile& tile, int64_t i) {
  Vec error = left;
  if (!tile.carries) {
    error = cpu::fma_once(left, cpu::broadcast(tile.gain), load_from(tile.error + i, tile.count - i));
  }
  return cpu::select(cpu::abs(error) <= __FLT_MAX__, error, Vec{});
}

template <class T, Code kCode>
void encode(const EncodeTile& tile) {
  constexpr int kBlock = block_elements(kCode);
  alignas(64) float values[kTile];
  alignas(64) uint8_t steps[kTile];
  const T* x = static_cast<const T*>(tile.x);
  const bool adds_error = tile.error != nullptr && tile.carries;
  for (int i = 0; i < kTile; i += kLanes) {
    Vec value = load_from(x + i, tile.count - i);
    if (adds_error) value = value + load_from(tile.error + i, tile.count - i);
    cpu::store(values + i, value);
  }
  for (int first = 0; first < kTile; first += kBlock) {
    float scale =
        kCode == Code::kOneBit ? mean_magnitude(values) : largest_of(values + first, kBlock) / largest_step(kCode);
    if (!(scale <= __FLT_MAX__)) scale = __builtin_nanf("");
    tile.scales[first / kBlock] = scale;
    const float inverse = scale >= kLeastScale ? 1.0f / scale : 0.0f;
    for (int i = first; i < first + kBlock; i += kLanes) {
      const Vec value = cpu::load(values + i);
      Vec step;
      if constexpr (kCode == Code::kOneBit) {
        step = cpu::select(value >= 0, cpu::broadcast(1.0f), cpu::broadcast(-1.0f));
        cpu::store_storage(steps + i, cpu::narrow_to_8((cpu::bits_of(step) >> 31) ^ 1u));
      } else {
        const Vec rounded = cpu::fma_once(value, cpu::broadcast(inverse), cpu::broadcast(kRounder));
        cpu::store_storage(steps + i, cpu::narrow_to_8(cpu::bits_of(rounded) & 0xffu));
        step = rounded - kRounder;
      }
      if (tile.error == nullptr) continue;
      const Vec left = cpu::fma_once(-step, cpu::broadcast(scale), value);
      store_to(tile.error + i, feedback(left, tile, i), tile.count - i);
    }
  }
  pack<kCode>(steps, tile.codes);
}

template <class T, Code kCode>
void decode(const DecodeTile& tile) {
  constexpr int kBlock = block_elements(kCode);
  alignas(64) float values[kTile] = {};
  alignas(64) uint8_t steps[kTile];
  T* output = static_cast<T*>(tile.output);
  for (int64_t row = 0; row < tile.rows; ++row) {
    unpack<kCode>(tile.codes + row * tile.code_stride, steps);
    const float* scales = tile.scales + row * tile.scale_stride;
    for (int i = 0; i < kTile; i += kLanes) {
      const VecU byte = cpu::widen_bits(cpu::load_storage<cpu::VecU8>(steps + i));
      const Vec step = cpu::from_bits((byte ^ 0x80u) + (0x4b400000u - 0x80u)) - kRounder;
      const Vec scale = cpu::broadcast(scales[i / kBlock]);
      cpu::store(values + i, cpu::fma_once(step, scale, cpu::load(values + i)));
    }
  }
  const float rows = static_cast<float>(tile.rows);
  for (int64_t i = 0; i < tile.count; i += kLanes) {
    Vec value = cpu::load(values + i);
    if (tile.is_mean) value = value / rows;
    if (tile.adds) value = value + load_from(output + i, tile.count - i);
    store_to(output + i, value, tile.count - i);
  }
}

#define KP_OF_EACH_CODE(function, T) \
  { function<T, Code::kInt8>, function<T, Code::kInt4>, function<T, Code::kOneBit> }

}  // namespace

extern const CodeKernels kCodeKernels = {
    {KP_OF_EACH_CODE(encode, float), KP_OF_EACH_CODE(encode, BFloat16), KP_OF_EACH_CODE(encode, Float16)},
    {KP_OF_EACH_CODE(decode, float), KP_OF_EACH_CODE(decode, BFloat16), KP_OF_EACH_CODE(decode, Float16)}};

#undef KP_OF_EACH_CODE

}  // namespace kernel_pytorch::gradient_code::KP_ISA_NAMESPACE
