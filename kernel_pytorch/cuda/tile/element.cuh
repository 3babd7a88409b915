// Element types on the device and their float values, one 32-bit word at a time: kernels compute in float and hold rows
// packed. bf16 and fp16 from sm_80, FP8 from sm_89. Bit for bit the rounding of base/float_types.h.
#pragma once

#include "kernel_pytorch/base/fixed_width.h"
#include "kernel_pytorch/cuda/ptx/convert.cuh"

namespace kernel_pytorch::tile {

struct BFloat16 {
  uint16_t bits;
};
struct Float16 {
  uint16_t bits;
};
struct Float8E4M3 {
  uint8_t bits;
};
struct Float8E5M2 {
  uint8_t bits;
};

template <class T>
inline constexpr int kPerWord = 4 / sizeof(T);

// The elements of a word, lowest address first, and back. The one place that knows the layouts.
template <class T>
struct Word;

template <>
struct Word<float> {
  static __device__ __forceinline__ void unpack(uint32_t word, float* values) { values[0] = __uint_as_float(word); }
  static __device__ __forceinline__ uint32_t pack(const float* values) { return __float_as_uint(values[0]); }
};

template <>
struct Word<BFloat16> {
  static __device__ __forceinline__ void unpack(uint32_t word, float* values) {
    values[0] = __uint_as_float(word << 16);
    values[1] = __uint_as_float(word & 0xffff0000u);
  }
  static __device__ __forceinline__ uint32_t pack(const float* values) {
    return ptx::cvt_rn_bf16x2_f32(values[1], values[0]);
  }
};

template <>
struct Word<Float16> {
  static __device__ __forceinline__ void unpack(uint32_t word, float* values) {
    values[0] = ptx::cvt_f32_f16(static_cast<uint16_t>(word));
    values[1] = ptx::cvt_f32_f16(static_cast<uint16_t>(word >> 16));
  }
  static __device__ __forceinline__ uint32_t pack(const float* values) {
    return ptx::cvt_rn_f16x2_f32(values[1], values[0]);
  }
};

template <>
struct Word<Float8E4M3> {
  static __device__ __forceinline__ void unpack(uint32_t word, float* values) {
    Word<Float16>::unpack(ptx::cvt_rn_f16x2_e4m3x2(static_cast<uint16_t>(word)), values);
    Word<Float16>::unpack(ptx::cvt_rn_f16x2_e4m3x2(static_cast<uint16_t>(word >> 16)), values + 2);
  }
  static __device__ __forceinline__ uint32_t pack(const float* values) {
    const uint32_t low = ptx::cvt_rn_satfinite_e4m3x2_f32(values[1], values[0]);
    const uint32_t high = ptx::cvt_rn_satfinite_e4m3x2_f32(values[3], values[2]);
    return low | high << 16;
  }
};

template <>
struct Word<Float8E5M2> {
  static __device__ __forceinline__ void unpack(uint32_t word, float* values) {
    Word<Float16>::unpack(ptx::cvt_rn_f16x2_e5m2x2(static_cast<uint16_t>(word)), values);
    Word<Float16>::unpack(ptx::cvt_rn_f16x2_e5m2x2(static_cast<uint16_t>(word >> 16)), values + 2);
  }
  static __device__ __forceinline__ uint32_t pack(const float* values) {
    const uint32_t low = ptx::cvt_rn_satfinite_e5m2x2_f32(values[1], values[0]);
    const uint32_t high = ptx::cvt_rn_satfinite_e5m2x2_f32(values[3], values[2]);
    return low | high << 16;
  }
};

// One element, for tails and strided access.
template <class T>
__device__ __forceinline__ float to_float(T element) {
  float values[kPerWord<T>];
  Word<T>::unpack(element.bits, values);
  return values[0];
}
template <>
__device__ __forceinline__ float to_float<float>(float element) {
  return element;
}

template <class T>
__device__ __forceinline__ T from_float(float value) {
  float values[kPerWord<T>] = {value};
  return T{static_cast<decltype(T::bits)>(Word<T>::pack(values))};
}
template <>
__device__ __forceinline__ float from_float<float>(float value) {
  return value;
}

// What the value becomes when it is stored as T.
template <class T>
__device__ __forceinline__ float round_to(float value) {
  return to_float<T>(from_float<T>(value));
}

}  // namespace kernel_pytorch::tile
