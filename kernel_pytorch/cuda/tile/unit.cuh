// Memory to registers and back: kCount consecutive elements of a thread as packed words, whole or, at odd addresses and
// at the end of a tensor, element by element.
#pragma once

#include "kernel_pytorch/cuda/tile/element.cuh"

namespace kernel_pytorch::tile {

template <int kBytes>
struct alignas(kBytes) Words {
  uint32_t words[kBytes / 4];
};

template <class T, int kCount>
struct Unit {
  static constexpr int kWords = kCount * static_cast<int>(sizeof(T)) / 4;
  static constexpr int kAccess = kWords * 4 < 16 ? kWords * 4 : 16;  // bytes of a load
  uint32_t words[kWords];

  static __device__ __forceinline__ Unit load(const void* tensor, int64_t index) {
    Unit unit;
    const auto* from = reinterpret_cast<const Words<kAccess>*>(static_cast<const T*>(tensor) + index);
#pragma unroll
    for (int i = 0; i < kWords * 4 / kAccess; ++i) {
      const Words<kAccess> some = from[i];
#pragma unroll
      for (int k = 0; k < kAccess / 4; ++k) unit.words[i * (kAccess / 4) + k] = some.words[k];
    }
    return unit;
  }
  __device__ __forceinline__ void store(void* tensor, int64_t index) const {
    auto* to = reinterpret_cast<Words<kAccess>*>(static_cast<T*>(tensor) + index);
#pragma unroll
    for (int i = 0; i < kWords * 4 / kAccess; ++i) {
      Words<kAccess> some;
#pragma unroll
      for (int k = 0; k < kAccess / 4; ++k) some.words[k] = words[i * (kAccess / 4) + k];
      to[i] = some;
    }
  }

  // Elements below `limit`, the others as zeros; none of the others is touched.
  static __device__ __forceinline__ Unit load_some(const void* tensor, int64_t index, int64_t limit) {
    Unit unit;
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      unit.words[i] = 0;
#pragma unroll
      for (int k = 0; k < 4 / static_cast<int>(sizeof(T)); ++k) {
        const int64_t place = index + i * (4 / static_cast<int>(sizeof(T))) + k;
        if (place < limit) unit.words[i] |= bits_at(tensor, place) << (k * 8 * sizeof(T));
      }
    }
    return unit;
  }
  __device__ __forceinline__ void store_some(void* tensor, int64_t index, int64_t limit) const {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      constexpr int kPer = 4 / static_cast<int>(sizeof(T));
      const uint32_t bits = words[i / kPer] >> (i % kPer * 8 * sizeof(T));
      if (index + i < limit) set_bits(tensor, index + i, bits);
    }
  }

 private:
  static __device__ __forceinline__ uint32_t bits_at(const void* tensor, int64_t place) {
    if constexpr (sizeof(T) == 1) return static_cast<const uint8_t*>(tensor)[place];
    if constexpr (sizeof(T) == 2) return static_cast<const uint16_t*>(tensor)[place];
    if constexpr (sizeof(T) == 4) return static_cast<const uint32_t*>(tensor)[place];
  }
  static __device__ __forceinline__ void set_bits(void* tensor, int64_t place, uint32_t bits) {
    if constexpr (sizeof(T) == 1) static_cast<uint8_t*>(tensor)[place] = static_cast<uint8_t>(bits);
    if constexpr (sizeof(T) == 2) static_cast<uint16_t*>(tensor)[place] = static_cast<uint16_t>(bits);
    if constexpr (sizeof(T) == 4) static_cast<uint32_t*>(tensor)[place] = bits;
  }
};

template <class T, int kCount>
__device__ __forceinline__ float value_of(const Unit<T, kCount>& unit, int i) {
  constexpr int kPer = kPerWord<T>;
  float values[kPer];
  Word<T>::unpack(unit.words[i / kPer], values);
  return values[i % kPer];
}
template <class T, int kCount>
__device__ __forceinline__ Unit<T, kCount> packed(const float (&values)[kCount]) {
  Unit<T, kCount> unit;
#pragma unroll
  for (int i = 0; i < Unit<T, kCount>::kWords; ++i) {
    unit.words[i] = Word<T>::pack(values + i * kPerWord<T>);
  }
  return unit;
}

// Bytes: one of a word, zero-extended; and the lowest bytes of four words as one.
__device__ __forceinline__ uint32_t byte_of(uint32_t word, int i) {
  return __byte_perm(word, 0, 0x4440 + i);
}
__device__ __forceinline__ uint32_t joined_bytes(uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
  return __byte_perm(__byte_perm(a, b, 0x0040), __byte_perm(c, d, 0x0040), 0x5410);
}

}  // namespace kernel_pytorch::tile
