// From two neighbouring sums of a product to what is written: every form of epilogue, chosen at run time, whatever the
// types. For kernels whose end is a small part of their work. Of doubles every tensor is fp64. sm_80.
#pragma once

#include "kernel_pytorch/cuda/tile/element.cuh"
#include "kernel_pytorch/ops/engines/gemm/tile/tile_cuda.h"
#include "kernel_pytorch/ops/engines/pointwise/cuda/double_math.cuh"
#include "kernel_pytorch/ops/engines/pointwise/cuda/math.cuh"

namespace kernel_pytorch::product {

template <class Real>
inline constexpr bool kIsDouble = sizeof(Real) == 8;

template <class Real>
__device__ __forceinline__ Real load_any(const void* data, TileType type, int64_t index) {
  if constexpr (kIsDouble<Real>) return static_cast<const double*>(data)[index];
  if (type == TileType::kFloat32) return static_cast<const float*>(data)[index];
  if (type == TileType::kBFloat16) return tile::to_float(static_cast<const tile::BFloat16*>(data)[index]);
  return tile::to_float(static_cast<const tile::Float16*>(data)[index]);
}
__device__ __forceinline__ void store_any(const TileMatrix& matrix, int64_t index, double value) {
  static_cast<double*>(matrix.data)[index] = value;
}
__device__ __forceinline__ void store_any(const TileMatrix& matrix, int64_t index, float value) {
  switch (matrix.type) {
    case TileType::kFloat32:
      static_cast<float*>(matrix.data)[index] = value;
      return;
    case TileType::kBFloat16:
      static_cast<tile::BFloat16*>(matrix.data)[index] = tile::from_float<tile::BFloat16>(value);
      return;
    case TileType::kFloat16:
      static_cast<tile::Float16*>(matrix.data)[index] = tile::from_float<tile::Float16>(value);
      return;
#if __CUDA_ARCH__ >= 890
    case TileType::kFloat8E4M3:
      static_cast<tile::Float8E4M3*>(matrix.data)[index] = tile::from_float<tile::Float8E4M3>(value);
      return;
    case TileType::kFloat8E5M2:
      static_cast<tile::Float8E5M2*>(matrix.data)[index] = tile::from_float<tile::Float8E5M2>(value);
      return;
#endif
    default:
      return;
  }
}

template <class Real = float>
class TileFinish {
 public:
  explicit __device__ __forceinline__ TileFinish(const TileArguments& arguments)
      : arguments_(arguments), batch_(blockIdx.z) {}

  // Columns `column` (even) and the next.
  __device__ __forceinline__ void finish(int32_t row, int32_t column, Real first, Real second) {
    if (row >= arguments_.m || column >= arguments_.n) return;
    Real values[2] = {first, second};
    const int32_t count = min(arguments_.n - column, 2);
    for (int i = 0; i < count; ++i) {
      values[i] *= alpha();
      if (arguments_.bias.data != nullptr) {
        values[i] += load_any<Real>(arguments_.bias.data, arguments_.bias.type, column + i);
      }
      if (arguments_.preactivation.data != nullptr) put(arguments_.preactivation, row, column + i, values[i]);
    }
    switch (arguments_.form) {
      case TileForm::kPlain:
        apply(values);
        for (int i = 0; i < count; ++i) end(row, column + i, values[i]);
        return;
      case TileForm::kGated: {
        Real gate[1] = {values[0]};
        apply(gate);
        end(row, column / 2, gate[0] * values[1]);
        return;
      }
      case TileForm::kGradient:
        for (int i = 0; i < count; ++i) end(row, column + i, values[i] * at(saved(row, column + i)).derivative);
        return;
      case TileForm::kGatedGradient:
        for (int i = 0; i < count; ++i) {
          const int32_t pair = 2 * (column + i);
          const auto gate = at(saved(row, pair));
          end(row, pair, values[i] * saved(row, pair + 1) * gate.derivative);
          end(row, pair + 1, values[i] * gate.value);
        }
        return;
    }
  }
  // The bits of nonnegative floats have the same order as integers.
  __device__ __forceinline__ void publish_amax() const {
    if (arguments_.amax != nullptr) atomicMax(reinterpret_cast<unsigned int*>(arguments_.amax), __float_as_uint(amax_));
  }

 private:
  __device__ __forceinline__ int64_t place(const TileMatrix& matrix, int32_t row, int32_t column) const {
    return batch_ * matrix.batch + row * matrix.row + column;
  }
  __device__ __forceinline__ Real saved(int32_t row, int32_t column) const {
    return load_any<Real>(arguments_.saved.data, arguments_.saved.type, place(arguments_.saved, row, column));
  }
  __device__ __forceinline__ void put(const TileMatrix& matrix, int32_t row, int32_t column, Real value) const {
    store_any(matrix, place(matrix, row, column), value);
  }
  __device__ __forceinline__ Real alpha() const {
    if constexpr (kIsDouble<Real>) return arguments_.wide_alpha;
    return arguments_.alpha;
  }
  __device__ __forceinline__ Real beta() const {
    if constexpr (kIsDouble<Real>) return arguments_.wide_beta;
    return arguments_.beta;
  }
  template <int kCount>
  __device__ __forceinline__ void apply(Real (&values)[kCount]) const {
    if constexpr (kIsDouble<Real>) {
      for (double& value : values) value = pointwise::differentiate(arguments_.kind, value).value;
    } else {
      pointwise::apply<true>(arguments_.kind, values);
    }
  }
  __device__ __forceinline__ auto at(Real x) const {
    if constexpr (kIsDouble<Real>) {
      return pointwise::differentiate(arguments_.kind, x);
    } else {
      pointwise::Values values{};
      pointwise::with_kind(arguments_.kind,
                           [&](auto constant) { values = pointwise::differentiate<constant.value, true>(x); });
      return values;
    }
  }
  __device__ __forceinline__ void end(int32_t row, int32_t column, Real value) {
    if (arguments_.residual.data != nullptr) {
      value += beta() * load_any<Real>(arguments_.residual.data, arguments_.residual.type,
                                       place(arguments_.residual, row, column));
    }
    if constexpr (!kIsDouble<Real>) {  // scales and amax are FP8's
      amax_ = fmaxf(amax_, fabsf(value));
      if (arguments_.output_scale != nullptr) value *= *arguments_.output_scale;
    }
    put(arguments_.output, row, column, value);
  }

  const TileArguments& arguments_;
  int64_t batch_;
  float amax_ = 0.0f;
};

}  // namespace kernel_pytorch::product
