// Unsigned numbers of 1 to 8 bits that lie bit by bit behind each other, the lowest bits of a byte first.
#pragma once

#include <cstdint>

#include "kernel_pytorch/cpu/convert.h"

namespace kernel_pytorch::cpu {
inline namespace KP_ISA_NAMESPACE {

// kLanes numbers from number `first` on, a multiple of kLanes, of a row of so many bytes; zeros behind its end.
template <int kBits>
KP_PRIMITIVE VecU unpack_bits(const uint8_t* row, int64_t first, int64_t row_bytes) {
  static_assert(kBits >= 1 && kBits <= 8);
  constexpr uint32_t kMask = (1u << kBits) - 1;
  [[maybe_unused]] const int64_t begin = first * kBits / 8, left = row_bytes - begin;
#if defined(__AVX512F__)
  // A lane's two bytes, shifted.
  const __m128i bytes =
      left >= 16 ? _mm_loadu_si128(reinterpret_cast<const __m128i*>(row + begin))
                 : _mm_maskz_loadu_epi8(static_cast<__mmask16>(left > 0 ? (1u << left) - 1 : 0), row + begin);
  alignas(32) uint8_t places[32];
  VecU shifts;
  for (int i = 0; i < 16; ++i) {  // constants
    places[2 * i] = static_cast<uint8_t>(i * kBits / 8);
    places[2 * i + 1] = static_cast<uint8_t>(i * kBits / 8 + 1 < 2 * kBits ? i * kBits / 8 + 1 : 0x80);
    shifts[i] = static_cast<uint32_t>(i * kBits % 8);
  }
  const __m256i pairs = _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(bytes),
                                            _mm256_load_si256(reinterpret_cast<const __m256i*>(places)));
  return (widen_bits(reinterpret_cast<VecU16>(pairs)) >> shifts) & kMask;
#elif defined(__AVX2__)
  uint64_t word = 0;
  if (left >= 8) {
    __builtin_memcpy(&word, row + begin, 8);
  } else if (left > 0) {
    __builtin_memcpy(&word, row + begin, static_cast<size_t>(left));
  }
  alignas(16) uint8_t places[16];
  VecU shifts;
  for (int i = 0; i < 8; ++i) {
    places[2 * i] = static_cast<uint8_t>(i * kBits / 8);
    places[2 * i + 1] = static_cast<uint8_t>(i * kBits / 8 + 1);
    shifts[i] = static_cast<uint32_t>(i * kBits % 8);
  }
  const __m128i pairs = _mm_shuffle_epi8(_mm_cvtsi64_si128(static_cast<int64_t>(word)),
                                         _mm_load_si128(reinterpret_cast<const __m128i*>(places)));
  return (widen_bits(reinterpret_cast<VecU16>(pairs)) >> shifts) & kMask;
#else
  VecU numbers;
  for (int i = 0; i < kLanes; ++i) {
    const int64_t bit = (first + i) * kBits, byte = bit / 8;
    const uint32_t low = byte < row_bytes ? row[byte] : 0, high = byte + 1 < row_bytes ? row[byte + 1] : 0;
    numbers[i] = (low | high << 8) >> (bit % 8) & kMask;
  }
  return numbers;
#endif
}

}  // namespace KP_ISA_NAMESPACE
}  // namespace kernel_pytorch::cpu
