// What the kernels of cross entropy share: the target of a row, the cap, what a row's totals become, the mean's divisor
// and the reduced loss.
#pragma once

#include "kernel_pytorch/cuda/tile/last_block.cuh"
#include "kernel_pytorch/cuda/tile/max_sum.cuh"
#include "kernel_pytorch/cuda/tile/vector.cuh"
#include "kernel_pytorch/ops/cross_entropy/cuda/arguments_cuda.h"
#include "kernel_pytorch/ops/support/any_rows.cuh"
#include "kernel_pytorch/ops/support/indices_cuda.h"

namespace kernel_pytorch::cross_entropy {

template <class T>
__device__ __forceinline__ float weight_at(const Arguments& arguments, int64_t index) {
  if (arguments.weight == nullptr) return 1.0f;
  return arguments.weight_is_float ? static_cast<const float*>(arguments.weight)[index]
                                   : tile::to_float<T>(static_cast<const T*>(arguments.weight)[index]);
}

// Sums over rows and classes: in double for fp32 rows, since a rounding of the mean's divisor is in all of the
// gradient.
template <class T>
struct SumType {
  using Type = float;
};
template <>
struct SumType<float> {
  using Type = double;
};
template <class T>
using Sum = typename SumType<T>::Type;

// The sum over all threads of a block, by warps, then in their order; `shared` holds a number for each warp.
template <class Number>
__device__ __forceinline__ Number sum_block(Number value, Number* shared) {
  const int warps = blockDim.x / tile::kWarpLanes;
  value = tile::sum_lanes<tile::kWarpLanes>(value);
  if (threadIdx.x % tile::kWarpLanes == 0) shared[threadIdx.x / tile::kWarpLanes] = value;
  __syncthreads();
  Number total = 0;
  for (int warp = 0; warp < warps; ++warp) total += shared[warp];
  __syncthreads();
  return total;
}

__device__ __forceinline__ int64_t target_at(const Arguments& arguments, int64_t row) {
  return index_at(arguments.target, arguments.target_is_wide, row);
}

// The sum of w[t] over the rows that count.
template <class T>
__device__ __forceinline__ Sum<T> count_targets(const Arguments& arguments, Sum<T>* shared) {
  Sum<T> sum = 0;
  for (int64_t row = threadIdx.x; row < arguments.shape.rows; row += blockDim.x) {
    const int64_t target = target_at(arguments, row);
    const bool is_valid = target >= 0 && target < arguments.vocabulary;
    if (target != arguments.ignore_index && is_valid) sum += weight_at<T>(arguments, target);
  }
  return sum_block(sum, shared);
}

// What all rows have in common. All threads of the block take part.
struct Whole {
  float divisor = 1;
  bool is_wide = false;  // fp32 rows, a constant: they know what the divisor's rounding lost
  float divisor_rest = 0;
  float weight_sum;

  template <class T>
  static __device__ __forceinline__ Whole make(const Arguments& arguments, Sum<T>* shared) {
    Whole whole;
    if (arguments.is_mean) {
      const Sum<T> divisor =
          arguments.counted != nullptr ? static_cast<Sum<T>>(*arguments.counted) : count_targets<T>(arguments, shared);
      whole.divisor = static_cast<float>(divisor);
      whole.is_wide = sizeof(T) == 4;
      if constexpr (sizeof(T) == 4) whole.divisor_rest = static_cast<float>(divisor - whole.divisor);
    }
    whole.weight_sum = static_cast<float>(arguments.vocabulary);
    if (arguments.weight != nullptr && arguments.share != 0) {
      Sum<T> sum = 0;
      for (int64_t j = threadIdx.x; j < arguments.vocabulary; j += blockDim.x) sum += weight_at<T>(arguments, j);
      whole.weight_sum = static_cast<float>(sum_block(sum, shared));
    }
    return whole;
  }
};

// softcap * tanh(logit / softcap), to about 3e-7 of the cap.
__device__ __forceinline__ float cap(float logit, float softcap) {
  const float power = ptx::ex2_approx_ftz_f32(logit * __fdividef(2 * tile::kLog2E, softcap));
  return softcap * (1.0f - 2.0f * ptx::rcp_approx_ftz_f32(power + 1.0f));
}

// kGeneral, here and below: with softcap, label smoothing or partials. Without them the code has nothing of these.
template <class T, bool kGeneral>
__device__ __forceinline__ void capped_logits(const tile::Vector<T>& vector, float softcap,
                                              float (&z)[tile::Vector<T>::kCount]) {
  vector.unpack(z);
  if constexpr (kGeneral) {
    if (softcap == 0) return;
#pragma unroll
    for (float& value : z) value = cap(value, softcap);
  }
}

// A running largest logit and sum of exponentials, and for smoothing the sum of w z.
template <class T, bool kGeneral>
struct Running {
  static constexpr int kCount = tile::Vector<T>::kCount;
  tile::MaxSum totals{tile::minus_infinity(), 0.0f};
  float center = 0;  // of totals
  float weighted = 0;

  // `column` is the first one's, of the whole vocabulary.
  __device__ __forceinline__ void add(const Arguments& arguments, const tile::Vector<T>& vector, int64_t column) {
    float z[kCount];
    capped_logits<T, kGeneral>(vector, arguments.softcap, z);
    float most[2] = {totals.largest, totals.largest};
#pragma unroll
    for (int k = 0; k < kCount; ++k) most[k % 2] = fmaxf(most[k % 2], z[k]);
    raise(fmaxf(most[0], most[1]));
    float sums[2] = {};
#pragma unroll
    for (int k = 0; k < kCount; ++k) sums[k % 2] += tile::exponential<T>(z[k], center);
    totals.sum += sums[0] + sums[1];
    if constexpr (kGeneral) {
#pragma unroll
      for (int k = 0; k < kCount; ++k) weighted += z[k] * weight_at<T>(arguments, column + k);
    }
  }
  __device__ __forceinline__ void add_one(const Arguments& arguments, float z, int64_t column) {
    raise(fmaxf(totals.largest, z));
    totals.sum += tile::exponential<T>(z, center);
    if constexpr (kGeneral) weighted += z * weight_at<T>(arguments, column);
  }

 private:
  __device__ __forceinline__ void raise(float largest) {
    if (largest == totals.largest) return;  // nearly always, after the first few vectors
    center = tile::exponent_center(largest);
    totals = {largest, totals.sum_around(center)};
  }
};

// gradient = along * e^(z - center) - share * w, less on_target at the target; times the cap's derivative.
struct Coefficients {
  float along, share, on_target, center;

  // The gradients of one vector whose first column (of this part) is `column`.
  template <class T, bool kGeneral>
  __device__ __forceinline__ tile::Vector<T> apply(const Arguments& arguments, const tile::Vector<T>& vector,
                                                   int column, int target_column) const {
    constexpr int kCount = tile::Vector<T>::kCount;
    float z[kCount], values[kCount];
    capped_logits<T, kGeneral>(vector, arguments.softcap, z);
#pragma unroll
    for (int k = 0; k < kCount; ++k) values[k] = along * tile::exponential<T>(z[k], center);
    if constexpr (kGeneral) {
#pragma unroll
      for (int k = 0; k < kCount; ++k) {
        values[k] -= share * weight_at<T>(arguments, arguments.first_column + column + k);
      }
    }
    const unsigned place = static_cast<unsigned>(target_column - column);
    if (place < kCount) {
#pragma unroll
      for (int k = 0; k < kCount; ++k) {
        if (k == place) values[k] -= on_target;
      }
    }
    if (kGeneral && arguments.softcap != 0) {
      const float inverse = 1.0f / arguments.softcap;
#pragma unroll
      for (int k = 0; k < kCount; ++k) values[k] *= 1.0f - (z[k] * inverse) * (z[k] * inverse);
    }
    return tile::Vector<T>::pack(values);
  }
  template <class T>
  __device__ __forceinline__ T apply_one(const Arguments& arguments, float z, int column, int target_column) const {
    const float weight = share != 0 ? weight_at<T>(arguments, arguments.first_column + column) : 1.0f;
    float value = along * tile::exponential<T>(z, center) - share * weight;
    if (column == target_column) value -= on_target;
    if (arguments.softcap != 0) value *= 1.0f - (z / arguments.softcap) * (z / arguments.softcap);
    return tile::from_float<T>(value);
  }
};

// A row's target: whether it counts, and where it lies.
struct Target {
  bool is_ignored;
  bool is_valid;
  int64_t index;
  int column = -1;  // of this part of the vocabulary; -1: elsewhere

  __device__ __forceinline__ Target(const Arguments& arguments, int64_t row) : index(target_at(arguments, row)) {
    is_ignored = index == arguments.ignore_index;
    is_valid = index >= 0 && index < arguments.vocabulary;
    const int64_t place = index - arguments.first_column;
    if (place >= 0 && place < arguments.shape.columns) column = static_cast<int>(place);
  }
  // (1 - label_smoothing) w[t]; NaN for a target that no vocabulary has.
  template <class T>
  __device__ __forceinline__ float weight(const Arguments& arguments) const {
    if (!is_valid) return __int_as_float(0x7fc00000);
    return (1.0f - arguments.label_smoothing) * weight_at<T>(arguments, index);
  }
};

__device__ __forceinline__ Coefficients coefficients_of(const Arguments& arguments, const Whole& whole, float on_target,
                                                        float lse, float scale, float rest = 0.0f) {
  const float along = on_target + arguments.share * whole.weight_sum + 2.0f * arguments.z_loss * lse;
  const auto scaled = [&](float value) { return rest == 0 ? value * scale : fmaf(value, scale, value * rest); };
  return {scaled(along), scaled(arguments.share), scaled(on_target), 0.0f};
}
// From a row's own totals: exponentials around the largest logit, divided by their sum.
__device__ __forceinline__ Coefficients forward_coefficients(const Arguments& arguments, const Whole& whole,
                                                             float on_target, const tile::MaxSum& totals) {
  const float lse = totals.largest + totals.log_sum();
  const float scale = arguments.gradient_scale / whole.divisor;
  float rest = 0;  // what the quotient lacks: its remainder by the whole divisor
  if (whole.is_wide) {
    rest = (fmaf(-scale, whole.divisor, arguments.gradient_scale) - scale * whole.divisor_rest) / whole.divisor;
  }
  Coefficients result = coefficients_of(arguments, whole, on_target, lse, scale, rest);
  result.along /= totals.sum;
  result.center = totals.center();
  return result;
}
// From the lse given.
__device__ __forceinline__ Coefficients backward_coefficients(const Arguments& arguments, const Whole& whole,
                                                              float on_target, int64_t row) {
  const float lse = arguments.given_lse[row];
  Coefficients result =
      coefficients_of(arguments, whole, on_target, lse, arguments.grad_loss[row * arguments.grad_loss_step]);
  result.center = tile::exponent_center(lse);
  // The center's rounding, which a sum of the same exponentials would have had too.
  result.along *= ptx::ex2_approx_ftz_f32(-fmaf(lse, tile::kLog2E, -result.center));
  return result;
}

// For one thread of a row. `own`: the target's capped logit, 0 where it is elsewhere.
__device__ __forceinline__ void store_row(const Arguments& arguments, const Whole& whole, int64_t row, float on_target,
                                          float own, const tile::MaxSum& totals, float weighted) {
  const float log_sum = totals.log_sum(), lse = totals.largest + log_sum;
  float loss = on_target * ((totals.largest - own) + log_sum);
  if (arguments.share != 0) loss += arguments.share * (whole.weight_sum * lse - weighted);
  if (arguments.z_loss != 0) loss += arguments.z_loss * lse * lse;
  if (arguments.loss != nullptr) arguments.loss[row] = loss;
  if (arguments.lse != nullptr) arguments.lse[row] = lse;
  if (arguments.partials == nullptr) return;
  // Around the largest itself, as the contract has it: without the center's rounding.
  arguments.partials[4 * row] = totals.largest;
  arguments.partials[4 * row + 1] = expf(log_sum);
  arguments.partials[4 * row + 2] = own;
  arguments.partials[4 * row + 3] = weighted;
}

__device__ __forceinline__ void store_ignored_row(const Arguments& arguments, int64_t row) {
  if (arguments.loss != nullptr) arguments.loss[row] = 0.0f;
  if (arguments.lse != nullptr) arguments.lse[row] = 0.0f;
  if (arguments.partials == nullptr) return;
  arguments.partials[4 * row] = tile::minus_infinity();
  for (int i = 1; i < 4; ++i) arguments.partials[4 * row + i] = 0.0f;
}

// The last block to arrive adds the losses up, in their order. All threads; thread 0 stored the losses of its block or
// met those who did at a barrier.
template <class T>
__device__ __forceinline__ void store_total(const Arguments& arguments, const Whole& whole, Sum<T>* shared) {
  if (arguments.total == nullptr) return;
  __shared__ bool is_last;
  __syncthreads();
  if (threadIdx.x == 0) is_last = tile::arrives_last(arguments.arrived, gridDim.x);
  __syncthreads();
  if (!is_last) return;
  Sum<T> sum = 0;
  for (int64_t row = threadIdx.x; row < arguments.shape.rows; row += blockDim.x) sum += __ldcg(arguments.loss + row);
  sum = sum_block(sum, shared);
  if (threadIdx.x == 0)
    *arguments.total = static_cast<float>(sum / (static_cast<Sum<T>>(whole.divisor) + whole.divisor_rest));
}

}  // namespace kernel_pytorch::cross_entropy
