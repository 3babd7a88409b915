// Row norms for whatever the vector kernels refuse: any strides, alignment, width and number of leading dimensions. One
// element per access and the row is read again for each pass (from L1 or L2 mostly): right first, fast second.
#pragma once

#include "kernel_pytorch/cuda/tile/reduce.cuh"
#include "kernel_pytorch/ops/engines/pointwise/cuda/math.cuh"
#include "kernel_pytorch/ops/engines/row_norm/cuda/any_cuda.h"
#include "kernel_pytorch/ops/support/any_rows.cuh"

namespace kernel_pytorch::row_norm {

template <class T>
__device__ __forceinline__ float scale_at(const AnyTensor& weight, bool is_float, float offset, int64_t column) {
  return weight.data == nullptr ? 1.0f : parameter_at<T>(weight, is_float, column) + offset;
}

// A row of T, or of a 16-bit type where T is float.
template <class T>
class MixedRow {
 public:
  __device__ __forceinline__ MixedRow(const AnyTensor& tensor, const AnyShape& shape, int64_t row, MixedType type)
      : start_(any_row_offset(tensor, shape, row)), tensor_(tensor), type_(type) {}
  __device__ __forceinline__ float operator[](int64_t column) const {
    const int64_t at = start_ + column * tensor_.column_stride;
    if constexpr (sizeof(T) == 4) {
      if (type_ == MixedType::kBFloat16) return tile::to_float(static_cast<const tile::BFloat16*>(tensor_.data)[at]);
      if (type_ == MixedType::kFloat16) return tile::to_float(static_cast<const tile::Float16*>(tensor_.data)[at]);
    }
    return tile::to_float<T>(static_cast<const T*>(tensor_.data)[at]);
  }

 private:
  const int64_t start_;
  const AnyTensor& tensor_;
  const MixedType type_;
};

template <class T>
__device__ __forceinline__ void store_mixed(void* data, int64_t at, float value, MixedType type) {
  if constexpr (sizeof(T) == 4) {
    if (type == MixedType::kBFloat16) {
      static_cast<tile::BFloat16*>(data)[at] = tile::from_float<tile::BFloat16>(value);
      return;
    }
    if (type == MixedType::kFloat16) {
      static_cast<tile::Float16*>(data)[at] = tile::from_float<tile::Float16>(value);
      return;
    }
  }
  static_cast<T*>(data)[at] = tile::from_float<T>(value);
}

// Rows over warps (narrow ones) or blocks; the sums of a block return after all its threads have entered them.
template <int kRowThreads, int kValues>
struct AnySum : tile::BlockSum<kRowThreads / tile::kWarpLanes, kValues> {
  using tile::BlockSum<kRowThreads / tile::kWarpLanes, kValues>::BlockSum;
};
template <int kValues>
struct AnySum<tile::kWarpLanes, kValues> {
  struct Storage {};
  __device__ __forceinline__ explicit AnySum(Storage&) {}
  __device__ __forceinline__ void sum(float (&values)[kValues]) {
    for (float& value : values) value = tile::sum_lanes<tile::kWarpLanes>(value);
  }
};

inline constexpr int kAnyThreads = 256;  // of a block whose warps each take a row

template <int kRowThreads>
struct AnyPlace {
  static constexpr int kThreads = kRowThreads == tile::kWarpLanes ? kAnyThreads : kRowThreads;
  int64_t first_row = static_cast<int64_t>(blockIdx.x) * (kThreads / kRowThreads) + threadIdx.x / kRowThreads;
  int64_t row_step = static_cast<int64_t>(gridDim.x) * (kThreads / kRowThreads);
  int64_t lane = threadIdx.x % kRowThreads;
};

// A thread's sum of a row of any length: parts short enough to be nearly exact, added with what each addition loses.
// One chain of 8,192 differences of 16-bit values rounds most of them the same way.
struct LongSum {
  static constexpr int kPart = 64;
  float part = 0, total = 0, lost = 0;

  __device__ __forceinline__ void fold() {
    const float next = total + part, added = next - total;
    lost += (total - (next - added)) + (part - added);
    total = next;
    part = 0;
  }
};

template <class T, int kRowThreads, bool kActivated = false>
__global__ void __launch_bounds__(AnyPlace<kRowThreads>::kThreads, 1)
    forward_any(const __grid_constant__ AnyForwardArguments arguments) {
  using Sum = AnySum<kRowThreads, 2>;
  __shared__ typename Sum::Storage storage;
  Sum sum(storage);
  const AnyPlace<kRowThreads> place;
  const int64_t columns = arguments.shape.columns;
  const float per_column = 1.0f / static_cast<float>(columns);
  for (int64_t row = place.first_row; row < arguments.shape.rows; row += place.row_step) {
    const AnyRow<T> x(arguments.x, arguments.shape, row);
    const MixedRow<T> residual(arguments.residual, arguments.shape, row, arguments.residual_type);
    const bool adds = arguments.residual.data != nullptr;
    T* sums = static_cast<T*>(arguments.sum) + row * columns;
    // A thread reads back only what it stored itself.
    const auto value_at = [&](int64_t column) { return adds ? tile::to_float<T>(sums[column]) : x[column]; };

    // Differences from the row's first value: exact where all are equal (tile/moments.cuh).
    const auto rounded_sum = [&](int64_t column) { return tile::from_float<T>(x[column] + residual[column]); };
    const float pivot = !arguments.centered ? 0.0f : adds ? tile::to_float<T>(rounded_sum(0)) : x[0];
    float sums_around_pivot[2] = {0, 0};  // of differences, of their squares
    for (int64_t column = place.lane; column < columns; column += kRowThreads) {
      float value = x[column];
      if (adds) {
        const T stored = rounded_sum(column);
        sums[column] = stored;
        value = tile::to_float<T>(stored);
      }
      value -= pivot;
      sums_around_pivot[0] += value;
      sums_around_pivot[1] += value * value;
    }
    sum.sum(sums_around_pivot);
    float mean = 0, squares = sums_around_pivot[1];
    if (arguments.centered) {
      // Rounded to the values' type: differences from it have few bits, so that their sums seldom round. Around any
      // other centre every sum of a 16-bit row would round the same way, and the mean be off.
      const float center = tile::round_to<T>(pivot + sums_around_pivot[0] * per_column);
      float sums_around_center[2] = {0, 0};
      LongSum differences;
      int added = 0;
      for (int64_t column = place.lane; column < columns; column += kRowThreads) {
        const float value = value_at(column) - center;
        differences.part += value;
        if (++added % LongSum::kPart == 0) differences.fold();
        sums_around_center[1] += value * value;
      }
      sums_around_center[0] = differences.total + differences.lost + differences.part;
      sum.sum(sums_around_center);
      const float distance = sums_around_center[0] * per_column;
      mean = center + distance;
      squares = sums_around_center[1] - distance * sums_around_center[0];
      squares = squares < 0 ? 0.0f : squares;  // a NaN stays one
    }
    const float rstd = rsqrtf(squares * per_column + arguments.eps);
    for (int64_t column = place.lane; column < columns; column += kRowThreads) {
      const float scale = scale_at<T>(arguments.weight, arguments.weight_is_float, arguments.weight_offset, column);
      const float shift =
          arguments.bias.data == nullptr ? 0.0f : parameter_at<T>(arguments.bias, arguments.weight_is_float, column);
      if constexpr (kActivated) {
        float output[1] = {(value_at(column) - mean) * rstd * scale + shift};
        pointwise::apply<pointwise::kIsAccurate<T>>(arguments.activation, output);
        store_mixed<T>(arguments.output, row * columns + column, output[0], arguments.output_type);
      } else {
        store_mixed<T>(arguments.output, row * columns + column, (value_at(column) - mean) * rstd * scale + shift,
                       arguments.output_type);
      }
    }
    if (place.lane == 0) {
      if (arguments.mean != nullptr) arguments.mean[row] = mean;
      if (arguments.rstd != nullptr) arguments.rstd[row] = rstd;
    }
  }
}

template <class T, int kRowThreads>
__global__ void __launch_bounds__(AnyPlace<kRowThreads>::kThreads, 1)
    backward_any(const __grid_constant__ AnyBackwardArguments arguments) {
  using Sum = AnySum<kRowThreads, 2>;
  __shared__ typename Sum::Storage storage;
  Sum sum(storage);
  const AnyPlace<kRowThreads> place;
  const int64_t columns = arguments.shape.columns;
  const float per_column = 1.0f / static_cast<float>(columns);
  for (int64_t row = place.first_row; row < arguments.shape.rows; row += place.row_step) {
    const MixedRow<T> grad_output(arguments.grad_output, arguments.shape, row, arguments.grad_output_type);
    const AnyRow<T> value(arguments.value, arguments.shape, row);
    const AnyRow<T> grad_sum(arguments.grad_sum, arguments.shape, row);
    T* grad_input = static_cast<T*>(arguments.grad_input) + row * columns;
    const float mean = arguments.centered ? arguments.mean[row] : 0.0f;
    const float rstd = arguments.rstd[row];
    const auto gradient_at = [&](int64_t column) {
      return grad_output[column] *
             scale_at<T>(arguments.weight, arguments.weight_is_float, arguments.weight_offset, column);
    };
    float totals[2] = {0, 0};  // of g * normal, of g
    for (int64_t column = place.lane; column < columns; column += kRowThreads) {
      const float gradient = gradient_at(column);
      totals[0] += gradient * ((value[column] - mean) * rstd);
      totals[1] += gradient;
    }
    sum.sum(totals);
    const float along = totals[0] * per_column;
    const float level = arguments.centered ? totals[1] * per_column : 0.0f;
    for (int64_t column = place.lane; column < columns; column += kRowThreads) {
      float gradient = rstd * (gradient_at(column) - level - (value[column] - mean) * rstd * along);
      if (arguments.grad_sum.data != nullptr) gradient += grad_sum[column];
      grad_input[column] = tile::from_float<T>(gradient);
    }
  }
}

// Sums over a chunk of rows of grad_output * normal and of grad_output, for 32 columns; in the order of the rows.
template <class T>
__global__ void __launch_bounds__(kColumnSumColumns* kColumnSumRows, 1)
    sum_columns_any(const __grid_constant__ AnyColumnSumArguments arguments) {
  __shared__ float partials[2][kColumnSumRows][kColumnSumColumns];
  const int lane = threadIdx.x % kColumnSumColumns, strip = threadIdx.x / kColumnSumColumns;
  const int64_t column = static_cast<int64_t>(blockIdx.x) * kColumnSumColumns + lane;
  const int64_t first = blockIdx.y * arguments.rows_per_chunk;
  const int64_t end = min(first + arguments.rows_per_chunk, static_cast<long long>(arguments.shape.rows));
  float along = 0, level = 0;
  if (column < arguments.shape.columns) {
    for (int64_t row = first + strip; row < end; row += kColumnSumRows) {
      const MixedRow<T> grad_output(arguments.grad_output, arguments.shape, row, arguments.grad_output_type);
      const float gradient = grad_output[column];
      const float mean = arguments.centered ? arguments.mean[row] : 0.0f;
      along += gradient * ((AnyRow<T>(arguments.value, arguments.shape, row)[column] - mean) * arguments.rstd[row]);
      level += gradient;
    }
  }
  partials[0][strip][lane] = along;
  partials[1][strip][lane] = level;
  __syncthreads();
  if (strip >= 2 || column >= arguments.shape.columns) return;
  float* target = strip == 0 ? arguments.weight_partial : arguments.bias_partial;
  if (target == nullptr) return;
  float total = 0;
  for (int other = 0; other < kColumnSumRows; ++other) total += partials[strip][other][lane];
  target[blockIdx.y * arguments.shape.columns + column] = total;
}

}  // namespace kernel_pytorch::row_norm
