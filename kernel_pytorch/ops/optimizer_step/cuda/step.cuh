// One unit of an optimizer's step: what a thread does between its loads and its stores. The threads of a group of 8-bit
// states are neighbours in a warp: its new scale is a maximum over shuffles, and codes never leave registers before.
#pragma once

#include "kernel_pytorch/cuda/ptx/math.cuh"
#include "kernel_pytorch/cuda/tile/unit.cuh"
#include "kernel_pytorch/ops/optimizer_step/arithmetic_cuda.h"
#include "kernel_pytorch/ops/optimizer_step/cuda/arguments_cuda.h"
#include "kernel_pytorch/ops/optimizer_step/cuda/rounding.cuh"

namespace kernel_pytorch::optimizer_step {

using tile::byte_of;
using tile::joined_bytes;
using tile::value_of;

struct DeviceMath {
  static __device__ __forceinline__ float mul(float a, float b) { return __fmul_rn(a, b); }
  static __device__ __forceinline__ float add(float a, float b) { return __fadd_rn(a, b); }
  static __device__ __forceinline__ float sub(float a, float b) { return __fsub_rn(a, b); }
  static __device__ __forceinline__ float fma(float a, float b, float c) { return __fmaf_rn(a, b, c); }
  // A step of Newton's rule makes the special unit's results, good to a unit in the last place or two, the nearest
  // floats (Markstein), as the compiler's own functions do; those also test for denormals and infinities, and branch.
  static __device__ __forceinline__ float root(float x) {
    const float inverse = ptx::rsqrt_approx_ftz_f32(x), guess = __fmul_rn(x, inverse);
    const float root = __fmaf_rn(__fmaf_rn(-guess, guess, x), __fmul_rn(inverse, 0.5f), guess);
    return x < kLeastSquare ? 0.0f : root;
  }
  static __device__ __forceinline__ float reciprocal(float x) {
    const float guess = ptx::rcp_approx_ftz_f32(x);
    return __fmaf_rn(guess, __fmaf_rn(-x, guess, 1.0f), guess);
  }
  static __device__ __forceinline__ float scalar_reciprocal(float x) { return reciprocal(x); }
  static __device__ __forceinline__ float at_least(float x, float least) { return ptx::max_nan_f32(x, least); }
  static __device__ __forceinline__ float larger(float x, float y) { return ptx::max_nan_f32(x, y); }
  static __device__ __forceinline__ float abs(float x) { return fabsf(x); }
  static __device__ __forceinline__ float sign(float x) { return x > 0 ? 1.0f : x < 0 ? -1.0f : x; }
  static __device__ __forceinline__ uint32_t min_bits(uint32_t a, uint32_t b) { return min(a, b); }
  static __device__ __forceinline__ uint32_t max_bits(uint32_t a, uint32_t b) { return max(a, b); }
  static __device__ __forceinline__ uint32_t bits(float x) { return __float_as_uint(x); }
  // Of a result of arithmetic, whose NaN is 0x7fffffff: adding to that one would make it a number.
  static __device__ __forceinline__ uint32_t quiet_bits(float x) { return min(__float_as_int(x), 0x7fc00000); }
};

__device__ const DynamicMap<true> kFirstMap = make_dynamic_map<true>();
__device__ const DynamicMap<false> kSecondMap = make_dynamic_map<false>();

// What a storage keeps in shared memory to read and write codes by.
template <Storage kStorage>
struct Tables {
  __device__ __forceinline__ void fill() {}
};
template <>
struct Tables<Storage::kCompanded> {
  float values[256];  // of first's codes, over the scale
  __device__ __forceinline__ void fill() {
    const float compressed = static_cast<float>(static_cast<int8_t>(threadIdx.x));
    values[threadIdx.x] = __fdiv_rn(compressed, 254.0f - fabsf(compressed));
  }
};
template <>
struct Tables<Storage::kDynamic> {
  DynamicMap<true> first;
  DynamicMap<false> second;
  template <class Map>
  static __device__ __forceinline__ void copy(Map& to, const Map& from) {
    static_assert(sizeof(Map) % 4 == 0);
    for (int i = threadIdx.x; i < sizeof(Map) / 4; i += kThreads) {
      reinterpret_cast<uint32_t*>(&to)[i] = reinterpret_cast<const uint32_t*>(&from)[i];
    }
  }
  __device__ __forceinline__ void fill() {
    copy(first, kFirstMap);
    copy(second, kSecondMap);
  }
};

// Over the threads of a group.
template <Storage kStorage>
__device__ __forceinline__ float group_scale(uint32_t largest) {
  if constexpr (kStorage == Storage::kDynamic) {
    largest = __reduce_max_sync(0xffffffffu, largest);
  } else {
#pragma unroll
    for (int lane = group_elements(kStorage) / kCodedUnit / 2; lane > 0; lane /= 2) {
      largest = max(largest, __shfl_xor_sync(0xffffffffu, largest, lane));
    }
  }
  return __uint_as_float(largest);
}

template <Rule kRule, Storage kStorage, class P, class S, WeightBits kWeightBits, bool kMaximum>
struct Step {
  static constexpr bool kHasSecond = kRule == Rule::kAdamW, kIsPlain = kStorage == Storage::kPlain;
  static constexpr bool kCorrection = kWeightBits == WeightBits::kCorrection;
  static constexpr bool kMaster = kWeightBits == WeightBits::kMaster;
  static constexpr int kCount = unit_elements(kStorage, sizeof(P), sizeof(S));
  using Codes = Unit<uint8_t, kCount>;
  using State = Unit<S, kCount>;  // S is uint8_t for codes

  struct Loaded {
    Unit<P, kCount> parameter, gradient;
    Codes correction;
    Unit<float, kCount> master;
    State first, second, maximum;
    float first_scale, second_scale;
  };

  const Entry& entry;
  const Factors& factors;
  const Tables<kStorage>& tables;
  Random random;
  bool is_whole;  // units may be loaded as such

  template <class AnyUnit>
  __device__ __forceinline__ void load(AnyUnit& unit, const void* tensor, int64_t index) const {
    unit = is_whole ? AnyUnit::load(tensor, index) : AnyUnit::load_some(tensor, index, entry.elements);
  }
  template <class AnyUnit>
  __device__ __forceinline__ void store(const AnyUnit& unit, void* tensor, int64_t index) const {
    if (is_whole) {
      unit.store(tensor, index);
    } else {
      unit.store_some(tensor, index, entry.elements);
    }
  }
  __device__ __forceinline__ bool has_first() const { return kRule != Rule::kSgd || entry.first != nullptr; }

  __device__ __forceinline__ Loaded load_all(int64_t index) const {
    Loaded loaded;
    if constexpr (!kMaster) load(loaded.parameter, entry.parameter, index);
    load(loaded.gradient, entry.gradient, index);
    if constexpr (kCorrection) load(loaded.correction, entry.weight_bits, index);
    if constexpr (kMaster) load(loaded.master, entry.weight_bits, index);
    if (has_first()) load(loaded.first, entry.first, index);
    if constexpr (kHasSecond) load(loaded.second, entry.second, index);
    if constexpr (kMaximum) load(loaded.maximum, entry.maximum, index);
    loaded.first_scale = loaded.second_scale = 0.0f;
    if constexpr (!kIsPlain) {
      if (is_whole || index < entry.elements) {
        loaded.first_scale = entry.first_scale[index / group_elements(kStorage)];
        if constexpr (kHasSecond) loaded.second_scale = entry.second_scale[index / group_elements(kStorage)];
      }
    }
    return loaded;
  }

  __device__ __forceinline__ float parameter_of(const Loaded& loaded, int i) const {
    if constexpr (kCorrection) {
      const uint32_t weight = loaded.parameter.words[i / 2] >> (i % 2 * 16) & 0xffffu;
      const int32_t correction = static_cast<int8_t>(byte_of(loaded.correction.words[i / 4], i % 4));
      return __uint_as_float(master_bits(weight, correction));
    } else if constexpr (kMaster) {
      return value_of(loaded.master, i);
    } else {
      return value_of(loaded.parameter, i);
    }
  }
  __device__ __forceinline__ float first_of(const Loaded& loaded, int i) const {
    if constexpr (kIsPlain) {
      return value_of(loaded.first, i);
    } else {
      const uint32_t code = byte_of(loaded.first.words[i / 4], i % 4);
      if constexpr (kStorage == Storage::kCompanded) return __fmul_rn(tables.values[code], loaded.first_scale);
      if constexpr (kStorage == Storage::kDynamic) {
        return __fmul_rn(dynamic_first(tables.first, code), loaded.first_scale);
      }
    }
  }
  __device__ __forceinline__ float second_of(const Loaded& loaded, int i, float unit) const {
    if constexpr (kIsPlain) {
      return value_of(loaded.second, i);
    } else if constexpr (kStorage == Storage::kCompanded) {
      // The byte under the exponent of 2^23: a float without a conversion, which runs at a quarter of the rate.
      const uint32_t shifted = __byte_perm(loaded.second.words[i / 4], 0x4b000000u, 0x7540 + i % 4);
      const float root = __fmul_rn(__fadd_rn(__uint_as_float(shifted), -8388608.0f), unit);
      return __fmul_rn(root, root);
    } else {
      const uint32_t code = byte_of(loaded.second.words[i / 4], i % 4);
      return __fmul_rn(tables.second.magnitudes[code], loaded.second_scale);
    }
  }

  __device__ __forceinline__ void store_parameters(const float (&values)[kCount], int64_t index) const {
    if constexpr (kCorrection) {
      Unit<P, kCount> weights;
      Codes corrections;
      uint32_t rounded[kCount];
#pragma unroll
      for (int i = 0; i < kCount; ++i) rounded[i] = rounded_master<DeviceMath>(values[i]);
#pragma unroll
      for (int i = 0; i < kCount / 2; ++i) {
        weights.words[i] = __byte_perm(rounded[2 * i] + 0x8000u, rounded[2 * i + 1] + 0x8000u, 0x7632);
      }
#pragma unroll
      for (int i = 0; i < kCount / 4; ++i) {
        const uint32_t low = __byte_perm(rounded[4 * i], rounded[4 * i + 1], 0x0051);
        const uint32_t high = __byte_perm(rounded[4 * i + 2], rounded[4 * i + 3], 0x0051);
        corrections.words[i] = __byte_perm(low, high, 0x5410);
      }
      store(weights, entry.parameter, index);
      store(corrections, entry.weight_bits, index);
    } else {
      if constexpr (kMaster) store(packed<float>(values), entry.weight_bits, index);
      store(random.rounded<P>(values, index, Draw::kParameter), entry.parameter, index);
    }
  }

  template <class CodeOf>
  static __device__ __forceinline__ Codes codes(const CodeOf& code_of) {
    Codes unit;
#pragma unroll
    for (int i = 0; i < kCount / 4; ++i) {
      unit.words[i] = joined_bytes(code_of(4 * i), code_of(4 * i + 1), code_of(4 * i + 2), code_of(4 * i + 3));
    }
    return unit;
  }
  // Elements beyond the end are zeros, which change no maximum.
  __device__ __forceinline__ float scale_of(const float (&values)[kCount], float* scales, int64_t index) const {
    float largest = 0;
#pragma unroll
    for (int i = 0; i < kCount; ++i) largest = ptx::max_nan_f32(largest, fabsf(values[i]));
    const float scale = group_scale<kStorage>(__float_as_uint(largest));
    if (index % group_elements(kStorage) == 0 && (is_whole || index < entry.elements))
      scales[index / group_elements(kStorage)] = scale;
    return scale;
  }

  __device__ __forceinline__ void run(const Loaded& loaded, int64_t index) const {
    float parameters[kCount], firsts[kCount], seconds[kCount], maxima[kCount];
    const float unit = __fmul_rn(loaded.second_scale, kRootUnit);
    const Keeps keeps{has_first(), kMaximum};
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      Element<float> element;
      element.parameter = parameter_of(loaded, i);
      element.gradient = value_of(loaded.gradient, i);
      element.first = keeps.first ? first_of(loaded, i) : 0.0f;
      if constexpr (kHasSecond) element.second = second_of(loaded, i, unit);
      if constexpr (kMaximum) element.maximum = value_of(loaded.maximum, i);
      update<DeviceMath, kRule>(element, keeps, factors);
      parameters[i] = element.parameter;
      // Code 0, as which elements beyond the end were loaded, is no zero of the dynamic map.
      const bool is_beyond = kStorage == Storage::kDynamic && !is_whole && index + i >= entry.elements;
      firsts[i] = is_beyond ? 0.0f : element.first;
      const float second = kStorage == Storage::kCompanded ? element.root : element.second;
      if constexpr (kHasSecond) seconds[i] = is_beyond ? 0.0f : second;
      if constexpr (kMaximum) maxima[i] = element.maximum;
    }
    store_parameters(parameters, index);
    if constexpr (kIsPlain) {
      if (keeps.first) store(random.rounded<S>(firsts, index, Draw::kFirst), entry.first, index);
      if constexpr (kHasSecond) store(random.rounded<S>(seconds, index, Draw::kSecond), entry.second, index);
      if constexpr (kMaximum) store(random.rounded<S>(maxima, index, Draw::kSecond), entry.maximum, index);
    } else {
      const float inverse = inverse_of_scale<DeviceMath>(scale_of(firsts, entry.first_scale, index));
      store(codes([&](int i) { return code_of_first(firsts[i], inverse); }), entry.first, index);
      if constexpr (kHasSecond) {
        const float inverse = inverse_of_scale<DeviceMath>(scale_of(seconds, entry.second_scale, index));
        store(codes([&](int i) { return code_of_second(seconds[i], inverse); }), entry.second, index);
      }
    }
  }
  __device__ __forceinline__ uint32_t code_of_first(float value, float inverse) const {
    if constexpr (kStorage == Storage::kCompanded) {
      return first_code<DeviceMath>(value, inverse);
    } else {
      const float scaled = __fmul_rn(value, inverse);
      return dynamic_first_code(tables.first, scaled, __float_as_uint(scaled));
    }
  }
  __device__ __forceinline__ uint32_t code_of_second(float value, float inverse) const {
    if constexpr (kStorage == Storage::kCompanded) {
      // root_code's bits, without its integers, which run at half the rate: a root is 0 or at least 2^-50.
      const float code = __fmaf_rn(value, __fmul_rn(inverse, 255.0f), 0x1.8p23f);
      return __float_as_uint(fmaxf(code, __fadd_rn(__saturatef(__fmul_rn(value, 0x1p50f)), 0x1.8p23f)));
    } else {
      const float scaled = __fmul_rn(value, inverse);
      return static_cast<uint32_t>(nearest_rank(tables.second, scaled, __float_as_uint(scaled)));
    }
  }
};

}  // namespace kernel_pytorch::optimizer_step
