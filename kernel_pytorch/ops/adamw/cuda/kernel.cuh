// A step of AdamW for a list of parameters: a block takes kUnits units a thread of one parameter, loads all of them
// before it waits for anything, and stores all after. Whichever block is last to have read its step advances all steps,
// so that the count needs no launch of its own.
#pragma once

#include "kernel_pytorch/base/philox.h"
#include "kernel_pytorch/cuda/tile/element.cuh"
#include "kernel_pytorch/ops/adamw/cuda/arguments_cuda.h"
#include "kernel_pytorch/ops/adamw/draws_cuda.h"

namespace kernel_pytorch::adamw {

// Four elements in registers and in memory.
template <class T>
struct alignas(kUnitElements * sizeof(T)) Unit {
  uint32_t words[kUnitElements / tile::kPerWord<T>];
  __device__ __forceinline__ void unpack(float (&values)[kUnitElements]) const {
#pragma unroll
    for (int i = 0; i < kUnitElements / tile::kPerWord<T>; ++i) {
      tile::Word<T>::unpack(words[i], values + i * tile::kPerWord<T>);
    }
  }
  static __device__ __forceinline__ Unit pack(const float (&values)[kUnitElements]) {
    Unit unit;
#pragma unroll
    for (int i = 0; i < kUnitElements / tile::kPerWord<T>; ++i) {
      unit.words[i] = tile::Word<T>::pack(values + i * tile::kPerWord<T>);
    }
    return unit;
  }
};

// What the elements of a parameter share (adamw/rates.h is the host's).
struct Factors {
  float gradient;
  float keep;
  float step_size;
  float root;
};

__device__ __forceinline__ Factors factors_of(const Arguments& arguments, float steps_taken) {
  const float lr = arguments.lr_value != nullptr ? *arguments.lr_value : arguments.lr;
  const float inverse_scale = arguments.grad_scale != nullptr ? 1.0f / *arguments.grad_scale : 1.0f;
  float gradient = arguments.maximize ? -inverse_scale : inverse_scale;
  if (arguments.total_norm != nullptr) {
    const float clip = arguments.max_norm / (*arguments.total_norm * inverse_scale + 1e-6f);
    gradient *= clip >= 1.0f ? 1.0f : clip;  // NaN clips to NaN
  }
  const float step = steps_taken + 1.0f;
  return {gradient, 1.0f - lr * arguments.weight_decay, lr / -expm1f(step * arguments.log_beta1),
          rsqrtf(-expm1f(step * arguments.log_beta2))};
}

struct Element {
  float parameter, gradient, first, second, largest;
};

template <bool kMaximum>
__device__ __forceinline__ void update_element(Element& element, const Arguments& arguments, const Factors& factors) {
  const float gradient = element.gradient * factors.gradient;
  element.first += (gradient - element.first) * arguments.first;
  element.second = element.second * arguments.beta2 + gradient * gradient * arguments.second;
  if (!kMaximum || element.second > element.largest || isnan(element.second)) element.largest = element.second;
  const float denominator = sqrtf(element.largest) * factors.root + arguments.eps;
  element.parameter = element.parameter * factors.keep - factors.step_size * element.first / denominator;
}

// The bits of an element, and of the two words that a unit has of its block.
struct Random {
  const int64_t* seed;
  uint64_t first_block;

  __device__ __forceinline__ uint32_t of_element(int64_t index, Draw draw) const {
    return philox(seed[0], seed[1], draw_block(first_block + index / kPhiloxElements, draw))
        .bits(static_cast<int>(index % kPhiloxElements));
  }
  __device__ __forceinline__ void of_unit(int64_t index, Draw draw, uint32_t (&words)[2]) const {
    const PhiloxBlock block = philox(seed[0], seed[1], draw_block(first_block + index / kPhiloxElements, draw));
    const bool is_second = index % kPhiloxElements != 0;
    words[0] = is_second ? block.words[2] : block.words[0];
    words[1] = is_second ? block.words[3] : block.words[1];
  }
};

// Random bits round bf16 alone; for the other types nothing of it is compiled.
template <class T>
inline constexpr bool kMayDraw = false;
template <>
inline constexpr bool kMayDraw<tile::BFloat16> = true;

template <class T>
__device__ __forceinline__ Unit<T> round_unit(const float (&values)[kUnitElements], const Random& random, int64_t index,
                                              Draw draw) {
  if constexpr (kMayDraw<T>) {
    if (random.seed != nullptr) {
      uint32_t words[2];
      random.of_unit(index, draw, words);
      Unit<T> unit;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const uint32_t low = round_stochastically(__float_as_uint(values[2 * i]), words[i] & 0xffff);
        const uint32_t high = round_stochastically(__float_as_uint(values[2 * i + 1]), words[i] >> 16);
        unit.words[i] = low | high << 16;
      }
      return unit;
    }
  }
  return Unit<T>::pack(values);
}

template <class T>
__device__ __forceinline__ T round_element(float value, const Random& random, int64_t index, Draw draw) {
  if constexpr (kMayDraw<T>) {
    if (random.seed != nullptr) return T{round_stochastically(__float_as_uint(value), random.of_element(index, draw))};
  }
  return tile::from_float<T>(value);
}

template <class T>
__device__ __forceinline__ Unit<T> load_unit(const void* tensor, int64_t index) {
  return *reinterpret_cast<const Unit<T>*>(static_cast<const T*>(tensor) + index);
}
template <class T>
__device__ __forceinline__ void store_unit(void* tensor, int64_t index, Unit<T> unit) {
  *reinterpret_cast<Unit<T>*>(static_cast<T*>(tensor) + index) = unit;
}

// All loads of kUnits units are on their way before prepare(), which ends with the barrier after which the factors
// hold.
template <class P, class S, int kUnits, bool kMaster, bool kMaximum, class Prepare>
__device__ __forceinline__ void update_units(const Entry& entry, const Arguments& arguments, const Factors& factors,
                                             int64_t begin, const Random& random, Prepare prepare) {
  using Weight = Unit<float>;
  Unit<P> parameters[kUnits], gradients[kUnits];
  Weight masters[kUnits];
  Unit<S> firsts[kUnits], seconds[kUnits], maxima[kUnits];
  const int64_t first = begin + threadIdx.x * kUnitElements;
#pragma unroll
  for (int i = 0; i < kUnits; ++i) {
    const int64_t index = first + i * kThreads * kUnitElements;
    if constexpr (kMaster) {
      masters[i] = load_unit<float>(entry.master, index);
    } else {
      parameters[i] = load_unit<P>(entry.parameter, index);
    }
    gradients[i] = load_unit<P>(entry.gradient, index);
    firsts[i] = load_unit<S>(entry.exp_avg, index);
    seconds[i] = load_unit<S>(entry.exp_avg_sq, index);
    if constexpr (kMaximum) maxima[i] = load_unit<S>(entry.max_exp_avg_sq, index);
  }
  prepare();
#pragma unroll
  for (int i = 0; i < kUnits; ++i) {
    const int64_t index = first + i * kThreads * kUnitElements;
    float parameter[kUnitElements], gradient[kUnitElements], average[kUnitElements], square[kUnitElements],
        largest[kUnitElements];
    if constexpr (kMaster) {
      masters[i].unpack(parameter);
    } else {
      parameters[i].unpack(parameter);
    }
    gradients[i].unpack(gradient);
    firsts[i].unpack(average);
    seconds[i].unpack(square);
    if constexpr (kMaximum) maxima[i].unpack(largest);
#pragma unroll
    for (int k = 0; k < kUnitElements; ++k) {
      Element element{parameter[k], gradient[k], average[k], square[k], kMaximum ? largest[k] : 0.0f};
      update_element<kMaximum>(element, arguments, factors);
      parameter[k] = element.parameter;
      average[k] = element.first;
      square[k] = element.second;
      largest[k] = element.largest;
    }
    store_unit<S>(entry.exp_avg, index, round_unit<S>(average, random, index, Draw::kFirst));
    store_unit<S>(entry.exp_avg_sq, index, round_unit<S>(square, random, index, Draw::kSecond));
    if constexpr (kMaximum) {
      store_unit<S>(entry.max_exp_avg_sq, index, round_unit<S>(largest, random, index, Draw::kSecond));
    }
    if constexpr (kMaster) store_unit<float>(entry.master, index, Weight::pack(parameter));
    store_unit<P>(entry.parameter, index, round_unit<P>(parameter, random, index, Draw::kParameter));
  }
}

// The last block of a parameter, and parameters at odd addresses: element by element.
template <class P, class S, bool kMaster, bool kMaximum, class Prepare>
__device__ __forceinline__ void update_elements(const Entry& entry, const Arguments& arguments, const Factors& factors,
                                                int64_t begin, int64_t end, const Random& random, Prepare prepare) {
  prepare();
  S* first = static_cast<S*>(entry.exp_avg);
  S* second = static_cast<S*>(entry.exp_avg_sq);
  S* largest = static_cast<S*>(entry.max_exp_avg_sq);
  P* parameter = static_cast<P*>(entry.parameter);
  for (int64_t i = begin + threadIdx.x; i < end; i += kThreads) {
    Element element{kMaster ? entry.master[i] : tile::to_float<P>(parameter[i]),
                    tile::to_float<P>(static_cast<const P*>(entry.gradient)[i]), tile::to_float<S>(first[i]),
                    tile::to_float<S>(second[i]), kMaximum ? tile::to_float<S>(largest[i]) : 0.0f};
    update_element<kMaximum>(element, arguments, factors);
    first[i] = round_element<S>(element.first, random, i, Draw::kFirst);
    second[i] = round_element<S>(element.second, random, i, Draw::kSecond);
    if constexpr (kMaximum) largest[i] = round_element<S>(element.largest, random, i, Draw::kSecond);
    if constexpr (kMaster) entry.master[i] = element.parameter;
    parameter[i] = round_element<P>(element.parameter, random, i, Draw::kParameter);
  }
}

template <class P, class S, int kUnits, bool kMaster, bool kMaximum>
__global__ void __launch_bounds__(kThreads, kUnits > 2 || (kMaster && kMaximum) ? 2 : 4)
    update(const __grid_constant__ Arguments arguments) {
  __shared__ Factors factors;
  __shared__ bool is_last;
  constexpr int kBlockElements = kThreads * kUnitElements * kUnits;
  if (arguments.found_inf != nullptr && *arguments.found_inf != 0.0f) return;
  const int place = tensor_of_chunk(blockIdx.x, arguments.count, [&](int i) { return arguments.entries[i].block_end; });
  const Entry& entry = arguments.entries[place];
  const int first_block = place == 0 ? 0 : arguments.entries[place - 1].block_end;
  const int64_t begin = static_cast<int64_t>(blockIdx.x - first_block) * kBlockElements;
  const int64_t end = min(begin + kBlockElements, static_cast<long long>(entry.elements));
  uint32_t ticket = 0;
  const auto prepare = [&] {
    if (threadIdx.x == 0) {
      const volatile float* step = entry.step;
      factors = factors_of(arguments, *step);
      __threadfence();
      ticket = atomicAdd(arguments.arrived, 1u);  // it is not needed before the end
    }
    __syncthreads();
  };
  const Random random{arguments.seed, entry.random_block};
  if (end - begin == kBlockElements && entry.is_aligned) {
    update_units<P, S, kUnits, kMaster, kMaximum>(entry, arguments, factors, begin, random, prepare);
  } else {
    update_elements<P, S, kMaster, kMaximum>(entry, arguments, factors, begin, end, random, prepare);
  }
  if (threadIdx.x == 0) is_last = ticket == gridDim.x - 1;
  __syncthreads();
  if (!is_last) return;
  __threadfence();
  for (int i = threadIdx.x; i < arguments.count; i += kThreads) *arguments.entries[i].step += 1.0f;
}

}  // namespace kernel_pytorch::adamw
