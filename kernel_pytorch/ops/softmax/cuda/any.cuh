// Softmax for whatever the vector kernels refuse: any strides, alignment, width and number of leading dimensions. One
// element per access, and the row is read again for each pass (from L1 or L2 mostly): right first, fast second.
#pragma once

#include "kernel_pytorch/cuda/tile/max_sum.cuh"
#include "kernel_pytorch/ops/softmax/cuda/arguments_cuda.h"
#include "kernel_pytorch/ops/support/any_rows.cuh"

namespace kernel_pytorch::softmax {

inline constexpr int kAnyThreads = 256;  // of a block whose warps each take a row

template <int kRowThreads>
struct AnyPlace {
  static constexpr int kThreads = kRowThreads == tile::kWarpLanes ? kAnyThreads : kRowThreads;
  int64_t first_row = static_cast<int64_t>(blockIdx.x) * (kThreads / kRowThreads) + threadIdx.x / kRowThreads;
  int64_t row_step = static_cast<int64_t>(gridDim.x) * (kThreads / kRowThreads);
  int64_t lane = threadIdx.x % kRowThreads;
};

template <int kRowThreads>
struct AnyMaxSum : tile::BlockMaxSum<kRowThreads / tile::kWarpLanes> {
  using tile::BlockMaxSum<kRowThreads / tile::kWarpLanes>::BlockMaxSum;
};
template <>
struct AnyMaxSum<tile::kWarpLanes> {
  struct Storage {};
  __device__ __forceinline__ explicit AnyMaxSum(Storage&) {}
  __device__ __forceinline__ tile::MaxSum merge(tile::MaxSum warp) { return warp; }
};

template <int kRowThreads>
struct AnySum : tile::BlockSum<kRowThreads / tile::kWarpLanes, 1> {
  using tile::BlockSum<kRowThreads / tile::kWarpLanes, 1>::BlockSum;
};
template <>
struct AnySum<tile::kWarpLanes> {
  struct Storage {};
  __device__ __forceinline__ explicit AnySum(Storage&) {}
  __device__ __forceinline__ void sum(float (&values)[1]) { values[0] = tile::sum_lanes<tile::kWarpLanes>(values[0]); }
};

template <class T>
class AnyScores {
 public:
  __device__ __forceinline__ AnyScores(const AnyForwardArguments& arguments, int64_t row)
      : x_(arguments.x, arguments.shape, row), scale_(arguments.scale), kind_(arguments.mask_kind) {
    if (kind_ == MaskKind::kNone) return;
    mask_stride_ = arguments.mask.column_stride;
    mask_offset_ = any_row_offset(arguments.mask, arguments.mask_shape, row);
    mask_ = arguments.mask.data;
  }
  __device__ __forceinline__ float operator[](int64_t column) const {
    const float score = x_[column] * scale_;
    if (kind_ == MaskKind::kNone) return score;
    const int64_t offset = mask_offset_ + column * mask_stride_;
    if (kind_ == MaskKind::kBool) {
      return static_cast<const uint8_t*>(mask_)[offset] != 0 ? score : tile::minus_infinity();
    }
    return score + (kind_ == MaskKind::kFloat ? static_cast<const float*>(mask_)[offset]
                                              : tile::to_float<T>(static_cast<const T*>(mask_)[offset]));
  }

 private:
  AnyRow<T> x_;
  const void* mask_ = nullptr;
  int64_t mask_offset_ = 0, mask_stride_ = 0;
  float scale_;
  MaskKind kind_;
};

template <class T, int kRowThreads>
__global__ void __launch_bounds__(AnyPlace<kRowThreads>::kThreads, 1)
    forward_any(const __grid_constant__ AnyForwardArguments arguments) {
  __shared__ typename AnyMaxSum<kRowThreads>::Storage storage;
  AnyMaxSum<kRowThreads> totals(storage);
  const AnyPlace<kRowThreads> place;
  const int64_t columns = arguments.shape.columns;
  for (int64_t row = place.first_row; row < arguments.shape.rows; row += place.row_step) {
    const AnyScores<T> scores(arguments, row);
    const int64_t visible = arguments.causal ? causal_columns(row, arguments.queries, columns) : columns;
    float largest = tile::minus_infinity();
    for (int64_t j = place.lane; j < visible; j += kRowThreads) largest = fmaxf(largest, scores[j]);
    largest = tile::max_lanes<tile::kWarpLanes>(largest);
    float sum = 0;
    for (int64_t j = place.lane; j < visible; j += kRowThreads) {
      sum += tile::exponential<T>(scores[j], tile::exponent_center(largest));
    }
    const tile::MaxSum total = totals.merge({largest, tile::sum_lanes<tile::kWarpLanes>(sum)});
    const bool is_empty = total.sum == 0 && arguments.empty_is_zero;
    const float factor = is_empty ? 0.0f : 1.0f / total.sum;
    const float base = total.largest == tile::minus_infinity() ? 0.0f : total.largest;
    const float log_sum = is_empty ? 0.0f : total.log_sum();
    T* output = static_cast<T*>(arguments.output) + row * columns;
    for (int64_t j = place.lane; j < columns; j += kRowThreads) {
      const float score = j < visible ? scores[j] : tile::minus_infinity();
      output[j] = tile::from_float<T>(arguments.log ? (score - base) - log_sum
                                                    : tile::exponential<T>(score, total.center()) * factor);
    }
  }
}

template <class T, int kRowThreads>
__global__ void __launch_bounds__(AnyPlace<kRowThreads>::kThreads, 1)
    backward_any(const __grid_constant__ AnyBackwardArguments arguments) {
  __shared__ typename AnySum<kRowThreads>::Storage storage;
  AnySum<kRowThreads> totals(storage);
  const AnyPlace<kRowThreads> place;
  const int64_t columns = arguments.shape.columns;
  for (int64_t row = place.first_row; row < arguments.shape.rows; row += place.row_step) {
    const AnyRow<T> gradient(arguments.grad_output, arguments.shape, row);
    const AnyRow<T> output(arguments.output, arguments.shape, row);
    float total[1] = {0};
    for (int64_t j = place.lane; j < columns; j += kRowThreads) {
      total[0] += arguments.log ? gradient[j] : gradient[j] * output[j];
    }
    totals.sum(total);
    T* grad_input = static_cast<T*>(arguments.grad_input) + row * columns;
    for (int64_t j = place.lane; j < columns; j += kRowThreads) {
      const float g = gradient[j], y = output[j];
      const bool is_removed = arguments.log && arguments.masked && y == tile::minus_infinity();
      const float value = arguments.log ? g - tile::exponential<T>(y, 0.0f) * total[0] : y * (g - total[0]);
      grad_input[j] = tile::from_float<T>(is_removed ? 0.0f : value * arguments.scale);
    }
  }
}

}  // namespace kernel_pytorch::softmax
