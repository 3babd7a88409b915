// Rounding rows to 8 bits and products of them, built once per instruction level.
#include "kernel_pytorch/base/float_types.h"
#include "kernel_pytorch/ops/int8_matmul/cpu/tile_isa.h"

namespace kernel_pytorch::int8_matmul::KP_ISA_NAMESPACE {
namespace {

template <class T>
float round_row(const void* from, int64_t k, uint8_t* codes) {
  const T* row = static_cast<const T*>(from);
  constexpr int64_t kPart = 256;
  alignas(64) float values[kPart];
  const auto load_part = [&](int64_t first, int64_t count) {
    for (int64_t i = 0; i < count; i += cpu::kLanes) {
      const bool is_whole = i + cpu::kLanes <= count;
      cpu::store(values + i, is_whole ? cpu::load(row + first + i) : cpu::load_partial(row + first + i, count - i));
    }
  };
  uint32_t largest = 0;  // magnitudes have the order of their bits; infinity and NaN are the largest
  for (int64_t first = 0; first < k; first += kPart) {
    const int64_t count = k - first < kPart ? k - first : kPart;
    load_part(first, count);
    for (int64_t i = 0; i < count; ++i) {
      const uint32_t magnitude = __builtin_bit_cast(uint32_t, values[i]) & 0x7fffffffu;
      largest = magnitude > largest ? magnitude : largest;
    }
  }
  const float exact = __builtin_bit_cast(float, largest) / 127.0f;
  const bool is_finite = largest < 0x7f800000u;
  const float scale = !is_finite ? __builtin_nanf("") : exact < 0x1p-100f ? 0.0f : exact;
  if (!(scale > 0.0f)) {
    for (int64_t i = 0; i < k; ++i) codes[i] = 128;
    return scale;
  }
  for (int64_t first = 0; first < k; first += kPart) {
    const int64_t count = k - first < kPart ? k - first : kPart;
    load_part(first, count);
    for (int64_t i = 0; i < count; ++i) {
      codes[first + i] = static_cast<uint8_t>(static_cast<int32_t>(__builtin_rintf(values[i] / scale)) + 128);
    }
  }
  return scale;
}

}  // namespace

extern const IntegerKernels kIntegerKernels = {{round_row<float>, round_row<BFloat16>, round_row<Float16>},
                                               multiply_block};

}  // namespace kernel_pytorch::int8_matmul::KP_ISA_NAMESPACE
