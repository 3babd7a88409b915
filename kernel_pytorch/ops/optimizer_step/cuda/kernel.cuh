// An optimizer's step for a list of parameters. Blocks stay: each takes many chunks of the list, and the next is under
// way while it computes the present one, in registers or, with kStages, in shared memory: memory never waits for
// arithmetic, and tables and factors are made once for many chunks. The threads of a group of 8-bit states are
// neighbours in a warp: its new scale is a maximum over shuffles, and codes never leave registers before. Whichever
// block is last to have read its steps advances all steps, so that the count needs no launch of its own.
#pragma once

#include "kernel_pytorch/cuda/ptx/math.cuh"
#include "kernel_pytorch/ops/optimizer_step/arithmetic_cuda.h"
#include "kernel_pytorch/ops/optimizer_step/cuda/arguments_cuda.h"
#include "kernel_pytorch/ops/optimizer_step/cuda/rounding.cuh"
#include "kernel_pytorch/ops/optimizer_step/cuda/staging.cuh"
#include "kernel_pytorch/ops/optimizer_step/cuda/units.cuh"
#include "kernel_pytorch/ops/optimizer_step/cuda/walk.cuh"

namespace kernel_pytorch::optimizer_step {

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
  static __device__ __forceinline__ uint32_t quiet_bits(float x) { return x == x ? __float_as_uint(x) : 0x7fc00000u; }
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
template <Storage kStorage, int kUnit>
__device__ __forceinline__ float group_scale(uint32_t largest) {
  if constexpr (group_elements(kStorage) == 32 * kUnit) {
    largest = __reduce_max_sync(0xffffffffu, largest);
  } else {
#pragma unroll
    for (int lane = group_elements(kStorage) / kUnit / 2; lane > 0; lane /= 2) {
      largest = max(largest, __shfl_xor_sync(0xffffffffu, largest, lane));
    }
  }
  return __uint_as_float(largest);
}

template <Rule kRule, Storage kStorage, class P, class S, WeightBits kWeightBits, bool kMaximum, int kUnit>
struct Step {
  static constexpr bool kHasSecond = kRule == Rule::kAdamW, kIsPlain = kStorage == Storage::kPlain;
  static constexpr bool kCorrection = kWeightBits == WeightBits::kCorrection;
  static constexpr bool kMaster = kWeightBits == WeightBits::kMaster, kHasMaximum = kMaximum;
  static constexpr int kGroup = group_elements(kStorage);
  static constexpr int kCount = kUnit;
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
  __device__ __forceinline__ void load(AnyUnit& unit, const void* tensor, Place place) const {
    unit = is_whole ? AnyUnit::load(tensor, place) : AnyUnit::load_some(tensor, place.index(), entry.elements);
  }
  template <class AnyUnit>
  __device__ __forceinline__ void store(const AnyUnit& unit, void* tensor, Place place) const {
    if (is_whole) {
      unit.store(tensor, place);
    } else {
      unit.store_some(tensor, place.index(), entry.elements);
    }
  }
  __device__ __forceinline__ bool has_first() const { return kRule != Rule::kSgd || entry.first != nullptr; }

  __device__ __forceinline__ Loaded load_all(Place place) const {
    Loaded loaded;
    if constexpr (!kMaster) load(loaded.parameter, entry.parameter, place);
    load(loaded.gradient, entry.gradient, place);
    if constexpr (kCorrection) load(loaded.correction, entry.weight_bits, place);
    if constexpr (kMaster) load(loaded.master, entry.weight_bits, place);
    if (has_first()) load(loaded.first, entry.first, place);
    if constexpr (kHasSecond) load(loaded.second, entry.second, place);
    if constexpr (kMaximum) load(loaded.maximum, entry.maximum, place);
    loaded.first_scale = loaded.second_scale = 0.0f;
    if constexpr (!kIsPlain) {
      if (is_whole || place.index() < entry.elements) {
        loaded.first_scale = entry.first_scale[place.index() / kGroup];
        if constexpr (kHasSecond) loaded.second_scale = entry.second_scale[place.index() / kGroup];
      }
    }
    return loaded;
  }

  __device__ __forceinline__ float parameter_of(const Loaded& loaded, int i) const {
    if constexpr (kCorrection) {
      const uint32_t word = loaded.parameter.words[i / 2], wide = i % 2 == 0 ? word << 16 : word & 0xffff0000u;
      return __uint_as_float(joined_master(wide, signed_byte_256(loaded.correction.words[i / 4], i % 4)));
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

  __device__ __forceinline__ void store_parameters(const float (&values)[kCount], Place place) const {
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
      store(weights, entry.parameter, place);
      store(corrections, entry.weight_bits, place);
    } else {
      if constexpr (kMaster) store(packed<float>(values), entry.weight_bits, place);
      store(random.rounded<P>(values, place.index(), Draw::kParameter), entry.parameter, place);
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
  __device__ __forceinline__ float scale_of(const float (&values)[kCount], float* scales, Place place) const {
    float largest = fabsf(values[0]);
#pragma unroll
    for (int i = 1; i < kCount; ++i) largest = ptx::max_nan_f32(largest, fabsf(values[i]));
    const float scale = group_scale<kStorage, kCount>(__float_as_uint(largest) & 0x7fffffffu);
    const bool is_first = place.offset % kGroup == 0 && (is_whole || place.index() < entry.elements);
    if (is_first) scales[place.begin / kGroup + place.offset / kGroup] = scale;
    return scale;
  }

  __device__ __forceinline__ void run(const Loaded& loaded, Place place) const {
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
      const bool is_beyond = kStorage == Storage::kDynamic && !is_whole && place.index() + i >= entry.elements;
      firsts[i] = is_beyond ? 0.0f : element.first;
      const float second = kStorage == Storage::kCompanded ? element.root : element.second;
      if constexpr (kHasSecond) seconds[i] = is_beyond ? 0.0f : second;
      if constexpr (kMaximum) maxima[i] = element.maximum;
    }
    store_parameters(parameters, place);
    if constexpr (kIsPlain) {
      if (keeps.first) store(random.rounded<S>(firsts, place.index(), Draw::kFirst), entry.first, place);
      if constexpr (kHasSecond) store(random.rounded<S>(seconds, place.index(), Draw::kSecond), entry.second, place);
      if constexpr (kMaximum) store(random.rounded<S>(maxima, place.index(), Draw::kSecond), entry.maximum, place);
    } else {
      const float inverse = inverse_of_scale<DeviceMath>(scale_of(firsts, entry.first_scale, place));
      store(codes([&](int i) { return code_of_first(firsts[i], inverse); }), entry.first, place);
      if constexpr (kHasSecond) {
        const float inverse = inverse_of_scale<DeviceMath>(scale_of(seconds, entry.second_scale, place));
        store(codes([&](int i) { return code_of_second(seconds[i], inverse); }), entry.second, place);
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
      return root_code<DeviceMath>(value, __fmul_rn(inverse, 255.0f));
    } else {
      const float scaled = __fmul_rn(value, inverse);
      return static_cast<uint32_t>(nearest_rank(tables.second, scaled, __float_as_uint(scaled)));
    }
  }
};

// Parts of the factors by threads of different warps, since each is a chain of slow operations in double.
__device__ __forceinline__ void set_factors(Factors& factors, Rule rule, const Arguments& arguments, float* step) {
  if (threadIdx.x % 32 != 0 || threadIdx.x >= 32 * kFactorParts) return;
  Signals signals;
  signals.lr = arguments.lr_value != nullptr ? *arguments.lr_value : arguments.rates.lr;
  signals.grad_scale = arguments.grad_scale != nullptr ? *arguments.grad_scale : 1.0;
  signals.has_norm = arguments.total_norm != nullptr;
  signals.total_norm = signals.has_norm ? *arguments.total_norm : 0.0;
  signals.steps_taken = *static_cast<const volatile float*>(step);
  set_factors_part(factors, threadIdx.x / 32, rule, arguments.rates, signals);
}

template <Rule kRule, Storage kStorage, class P, class S, WeightBits kWeightBits, bool kMaximum, int kUnit, int kBlocks,
          int kStages>
__global__ void __launch_bounds__(kThreads, kBlocks) step(const __grid_constant__ Arguments arguments) {
  using OneStep = Step<kRule, kStorage, P, S, kWeightBits, kMaximum, kUnit>;
  __shared__ Factors factors;
  __shared__ Tables<kStorage> tables;
  __shared__ bool is_last;
  if (arguments.found_inf != nullptr && *arguments.found_inf != 0.0f) return;
  tables.fill();
  const auto step_of = [&](int place, bool is_whole) {
    const Entry& entry = arguments.entries[place];
    return OneStep{entry, factors, tables, {arguments.seed, entry.random_block}, is_whole};
  };
  const uint32_t offset = threadIdx.x * OneStep::kCount;
  Walk<kThreads * OneStep::kCount> walk(arguments);
  int factors_place = -1;
  const auto run = [&](const Chunk& chunk, const typename OneStep::Loaded& loaded) {
    if (chunk.place != factors_place) {
      __syncthreads();
      set_factors(factors, kRule, arguments, arguments.entries[chunk.place].step);
      __syncthreads();
      factors_place = chunk.place;
    }
    const Place place{chunk.begin, offset};
    if (chunk.is_whole) {
      step_of(chunk.place, true).run(loaded, place);
    } else {
      const OneStep one = step_of(chunk.place, false);
      one.run(one.load_all(place), place);
    }
  };
  if constexpr (kStages == 0) {
    typename OneStep::Loaded next;
    const auto fetch = [&] {
      const Chunk chunk = walk.next();
      if (chunk.place >= 0 && chunk.is_whole) next = step_of(chunk.place, true).load_all({chunk.begin, offset});
      return chunk;
    };
    for (Chunk following = fetch(); following.place >= 0;) {
      const Chunk chunk = following;
      const typename OneStep::Loaded loaded = next;
      following = fetch();
      run(chunk, loaded);
    }
  } else {
    using Stages = Staging<OneStep, kStages>;
    static_assert(sizeof(Stages) ==
                  kStages * staged_bytes(kRule, kStorage, sizeof(P), sizeof(S), kWeightBits, kMaximum, kUnit));
    extern __shared__ __align__(16) char dynamic_memory[];
    Stages& staging = *reinterpret_cast<Stages*>(dynamic_memory);
    const auto fetch = [&](int stage) {
      const Chunk chunk = walk.next();
      if (chunk.place >= 0 && chunk.is_whole) {
        staging.fetch(stage, step_of(chunk.place, true), {chunk.begin, offset});
      }
      ptx::cp_async_commit_group();
      return chunk;
    };
    Chunk chunks[kStages];
#pragma unroll
    for (int i = 0; i < kStages; ++i) chunks[i] = fetch(i);
    for (int stage = 0; chunks[0].place >= 0; stage = stage + 1 == kStages ? 0 : stage + 1) {
      ptx::cp_async_wait_group<kStages - 1>();
      run(chunks[0], staging.take(stage));
#pragma unroll
      for (int i = 1; i < kStages; ++i) chunks[i - 1] = chunks[i];
      chunks[kStages - 1] = fetch(stage);
    }
  }
  if (threadIdx.x == 0) {
    __threadfence();
    is_last = atomicAdd(arguments.arrived, 1u) == gridDim.x - 1;
  }
  __syncthreads();
  if (!is_last) return;
  __threadfence();
  for (int i = threadIdx.x; i < arguments.count; i += kThreads) *arguments.entries[i].step += 1.0f;
}

}  // namespace kernel_pytorch::optimizer_step
