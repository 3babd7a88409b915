// Memory to lanes and back, for every float type: load and store convert at the edge, so that the body of a kernel is
// float (double for double). `_partial` takes the first `count` lanes (0 to all), reads nothing beyond them and fills
// the rest with zeros. `2` means two vectors of consecutive elements: half the shuffles for bf16 where the level is
// wide. `stream` writes past the caches: its address must be aligned to what it writes (elements_to_alignment), and
// stream_fence() must follow before the data is handed to another thread.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernel_pytorch/cpu/convert.h"

namespace kernel_pytorch::cpu {
inline namespace KP_ISA_NAMESPACE {

template <class Storage>
KP_PRIMITIVE Storage load_storage(const void* address) {
  Storage stored;
  __builtin_memcpy(&stored, address, sizeof(Storage));
  return stored;
}

// Masked instructions where the level has them for this width, else a copy of the bytes: tails come once per row.
// SVE masks bytes of its whole vectors; narrow elements of its lanes are NEON's registers, and are copied.
template <class Storage, int kElementBytes>
KP_PRIMITIVE Storage load_storage_partial(const void* address, int64_t count) {
#if defined(__AVX512BW__) && defined(__AVX512VL__)
  const uint32_t mask = (1u << count) - 1;
  if constexpr (kElementBytes == 8) {
    return reinterpret_cast<Storage>(_mm512_maskz_loadu_epi64(static_cast<__mmask8>(mask), address));
  } else if constexpr (kElementBytes == 4) {
    return reinterpret_cast<Storage>(_mm512_maskz_loadu_epi32(static_cast<__mmask16>(mask), address));
  } else if constexpr (kElementBytes == 2) {
    return reinterpret_cast<Storage>(_mm256_maskz_loadu_epi16(static_cast<__mmask16>(mask), address));
  } else {
    return reinterpret_cast<Storage>(_mm_maskz_loadu_epi8(static_cast<__mmask16>(mask), address));
  }
#else
#if defined(__ARM_FEATURE_SVE)
  if constexpr (sizeof(Storage) == kVectorBytes) {
    const SveBytes loaded = svld1_u8(svwhilelt_b8_s64(0, count * kElementBytes), static_cast<const uint8_t*>(address));
    return reinterpret_cast<Storage>(VecBytes(loaded));
  }
#endif
  Storage stored = {};
  __builtin_memcpy(&stored, address, static_cast<size_t>(count) * kElementBytes);
  return stored;
#endif
}

template <class Storage>
KP_PRIMITIVE void store_storage(void* address, Storage stored) {
  __builtin_memcpy(address, &stored, sizeof(Storage));
}

template <class Storage, int kElementBytes>
KP_PRIMITIVE void store_storage_partial(void* address, Storage stored, int64_t count) {
#if defined(__AVX512BW__) && defined(__AVX512VL__)
  const uint32_t mask = (1u << count) - 1;
  if constexpr (kElementBytes == 8) {
    _mm512_mask_storeu_epi64(address, static_cast<__mmask8>(mask), reinterpret_cast<__m512i>(stored));
  } else if constexpr (kElementBytes == 4) {
    _mm512_mask_storeu_epi32(address, static_cast<__mmask16>(mask), reinterpret_cast<__m512i>(stored));
  } else if constexpr (kElementBytes == 2) {
    _mm256_mask_storeu_epi16(address, static_cast<__mmask16>(mask), reinterpret_cast<__m256i>(stored));
  } else {
    _mm_mask_storeu_epi8(address, static_cast<__mmask16>(mask), reinterpret_cast<__m128i>(stored));
  }
#else
#if defined(__ARM_FEATURE_SVE)
  if constexpr (sizeof(Storage) == kVectorBytes) {
    const SveBytes bytes = SveBytes(reinterpret_cast<VecBytes>(stored));
    return svst1_u8(svwhilelt_b8_s64(0, count * kElementBytes), static_cast<uint8_t*>(address), bytes);
  }
#endif
  __builtin_memcpy(address, &stored, static_cast<size_t>(count) * kElementBytes);
#endif
}

template <class Storage>
KP_PRIMITIVE void stream_storage(void* address, Storage stored) {
#if defined(__x86_64__)
  if constexpr (sizeof(Storage) == 4) {
    _mm_stream_si32(static_cast<int*>(address), reinterpret_cast<int>(stored));
  } else if constexpr (sizeof(Storage) == 8) {
    _mm_stream_si64(static_cast<long long*>(address), reinterpret_cast<long long>(stored));
  } else if constexpr (sizeof(Storage) == 16) {
    _mm_stream_si128(static_cast<__m128i*>(address), reinterpret_cast<__m128i>(stored));
  }
#if defined(__AVX2__)
  else if constexpr (sizeof(Storage) == 32) {
    _mm256_stream_si256(static_cast<__m256i*>(address), reinterpret_cast<__m256i>(stored));
  }
#endif
#if defined(__AVX512F__)
  else if constexpr (sizeof(Storage) == 64) {
    _mm512_stream_si512(static_cast<__m512i*>(address), reinterpret_cast<__m512i>(stored));
  }
#endif
#else
  store_storage(address, stored);
#endif
}

template <class T>
KP_PRIMITIVE VecOf<T> load(const T* address) {
  return decode<T>(load_storage<StorageOf<T>>(address));
}
template <class T>
KP_PRIMITIVE VecOf<T> load_partial(const T* address, int64_t count) {
  return decode<T>(load_storage_partial<StorageOf<T>, sizeof(T)>(address, count));
}
template <class T>
KP_PRIMITIVE void store(T* address, VecOf<T> value) {
  store_storage(address, encode<T>(value));
}
template <class T>
KP_PRIMITIVE void store_partial(T* address, VecOf<T> value, int64_t count) {
  store_storage_partial<StorageOf<T>, sizeof(T)>(address, encode<T>(value), count);
}
template <class T>
KP_PRIMITIVE void stream(T* address, VecOf<T> value) {
  stream_storage(address, encode<T>(value));
}

template <class V>
struct Pair {
  V low;  // the elements that come first in memory
  V high;
};
template <class T>
using PairOf = Pair<VecOf<T>>;

// Two stored vectors in one register, where that has a meaning: bf16 and fp16 with 16 lanes fill 64 bytes.
typedef uint16_t VecU16x2 __attribute__((vector_size(kLanes * 4)));

KP_PRIMITIVE VecU16x2 float_to_bfloat16_pair(Vec low, Vec high) {
  const VecU16x2 first = reinterpret_cast<VecU16x2>(round_to_bfloat16(low));
  const VecU16x2 second = reinterpret_cast<VecU16x2>(round_to_bfloat16(high));
#if defined(__AVX512F__)
  return __builtin_shufflevector(first, second, 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31, 33, 35, 37,
                                 39, 41, 43, 45, 47, 49, 51, 53, 55, 57, 59, 61, 63);
#elif defined(__AVX2__)
  const __m256i by_128_bits = _mm256_packus_epi32(_mm256_srli_epi32(reinterpret_cast<__m256i>(first), 16),
                                                  _mm256_srli_epi32(reinterpret_cast<__m256i>(second), 16));
  return reinterpret_cast<VecU16x2>(_mm256_permute4x64_epi64(by_128_bits, 0xd8));
#elif KP_LANES == 8
  return __builtin_shufflevector(first, second, 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31);
#else
  return __builtin_shufflevector(first, second, 1, 3, 5, 7, 9, 11, 13, 15);
#endif
}

template <class T>
KP_PRIMITIVE PairOf<T> load2(const T* address) {
  return {load(address), load(address + kLanesOf<T>)};
}
// The same elements in whatever order is cheapest, for sums: bf16 splits into its even and odd elements with a shift
// and a mask, no widening.
template <class T>
KP_PRIMITIVE PairOf<T> load2_unordered(const T* address) {
  if constexpr (__is_same(T, BFloat16)) {
    const VecU bits = load_storage<VecU>(address);
    return {from_bits(bits << 16), from_bits(bits & 0xffff0000u)};
  } else {
    return load2(address);
  }
}
template <class T>
KP_PRIMITIVE void store2(T* address, PairOf<T> pair) {
  if constexpr (__is_same(T, BFloat16)) {
    store_storage(address, float_to_bfloat16_pair(pair.low, pair.high));
  } else {
    store(address, pair.low);
    store(address + kLanesOf<T>, pair.high);
  }
}
// Aligned to two vectors of T.
template <class T>
KP_PRIMITIVE void stream2(T* address, PairOf<T> pair) {
  if constexpr (__is_same(T, BFloat16)) {
    stream_storage(address, float_to_bfloat16_pair(pair.low, pair.high));
  } else {
    stream(address, pair.low);
    stream(address + kLanesOf<T>, pair.high);
  }
}

// What load2_unordered took, back in its place: bf16 joins even and odd elements without a shuffle.
// kOfSame: of values that were computed from T alone (round_to_bfloat16).
template <bool kOfBfloat16>
KP_PRIMITIVE VecU join_bfloat16_unordered(Pair<Vec> pair) {
  return (round_to_bfloat16<kOfBfloat16>(pair.low) >> 16) | (round_to_bfloat16<kOfBfloat16>(pair.high) & 0xffff0000u);
}
template <class T, bool kOfSame = false>
KP_PRIMITIVE void store2_unordered(T* address, PairOf<T> pair) {
  if constexpr (__is_same(T, BFloat16)) {
    store_storage(address, join_bfloat16_unordered<kOfSame>(pair));
  } else {
    store2(address, pair);
  }
}
// Aligned to two vectors of T.
template <class T, bool kOfSame = false>
KP_PRIMITIVE void stream2_unordered(T* address, PairOf<T> pair) {
  if constexpr (__is_same(T, BFloat16)) {
    stream_storage(address, join_bfloat16_unordered<kOfSame>(pair));
  } else {
    stream2(address, pair);
  }
}

// How many elements to handle before `address` is aligned to this power of two of bytes (it must be aligned to T).
template <class T>
KP_PRIMITIVE int64_t elements_to_alignment(const T* address, int64_t alignment_bytes) {
  return static_cast<int64_t>(-reinterpret_cast<uintptr_t>(address) & (alignment_bytes - 1)) / int64_t{sizeof(T)};
}

// Float lanes as two vectors of double, and back, for sums in double.
typedef float VecHalf __attribute__((vector_size(kVectorBytes / 2)));
KP_PRIMITIVE Pair<VecD> to_double(Vec v) {
#if defined(__ARM_FEATURE_SVE)
  const svuint32_t bits = svreinterpret_u32_f32(SveFloat(v));
  const SveDouble low = svcvt_f64_f32_x(svptrue_b64(), svreinterpret_f32_u64(svunpklo_u64(bits)));
  const SveDouble high = svcvt_f64_f32_x(svptrue_b64(), svreinterpret_f32_u64(svunpkhi_u64(bits)));
  return {VecD(low), VecD(high)};
#else
  VecHalf halves[2];
  __builtin_memcpy(halves, &v, sizeof(v));
  return {__builtin_convertvector(halves[0], VecD), __builtin_convertvector(halves[1], VecD)};
#endif
}
KP_PRIMITIVE Vec to_float(Pair<VecD> pair) {
#if defined(__ARM_FEATURE_SVE)
  const SveFloat even = svuzp1_f32(svcvt_f32_f64_x(svptrue_b64(), SveDouble(pair.low)),
                                   svcvt_f32_f64_x(svptrue_b64(), SveDouble(pair.high)));
  return Vec(even);
#else
  const VecHalf halves[2] = {__builtin_convertvector(pair.low, VecHalf), __builtin_convertvector(pair.high, VecHalf)};
  Vec v;
  __builtin_memcpy(&v, halves, sizeof(v));
  return v;
#endif
}

}  // namespace KP_ISA_NAMESPACE
}  // namespace kernel_pytorch::cpu
