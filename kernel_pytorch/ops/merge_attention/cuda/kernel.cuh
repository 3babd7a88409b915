// Merging parts of attention: a warp reads the two rows of a head once and writes their weighted sum. sm_80.
#pragma once

#include "kernel_pytorch/cuda/tile/dependent_launch.cuh"
#include "kernel_pytorch/cuda/tile/vector.cuh"
#include "kernel_pytorch/ops/merge_attention/cuda/arguments_cuda.h"

namespace kernel_pytorch::merge_attention {

__device__ __forceinline__ float lse_at(const Sums& sums, int64_t token, int32_t head) {
  return sums.data[head * sums.head_stride + token * sums.token_stride];
}
template <class T>
__device__ __forceinline__ const T* row_at(const Rows& rows, int64_t token, int32_t head) {
  return static_cast<const T*>(rows.data) + token * rows.token_stride + head * rows.head_stride;
}

template <class T>
__global__ void __launch_bounds__(kThreads, 4) merge(const __grid_constant__ MergeArguments arguments) {
  tile::follow_closely();
  const int64_t row = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / 32;
  if (row >= arguments.rows) return;
  const int32_t lane = static_cast<int32_t>(threadIdx.x % 32);
  const int64_t token = row / arguments.heads;
  const int32_t head = static_cast<int32_t>(row - token * arguments.heads);
  const float nothing = __int_as_float(0xff800000);
  const float lse1 = lse_at(arguments.first_lse, token, head), lse2 = lse_at(arguments.second_lse, token, head);
  const float most = fmaxf(lse1, lse2);
  float weight1 = lse1 == nothing ? 0.0f : expf(lse1 - most);
  float weight2 = lse2 == nothing ? 0.0f : expf(lse2 - most);
  const float sum = weight1 + weight2;
  if (lane == 0 && arguments.lse.data != nullptr) {
    const_cast<float*>(arguments.lse.data)[head * arguments.lse.head_stride + token * arguments.lse.token_stride] =
        sum == 0.0f ? nothing : most + logf(sum);
  }
  const float inverse = sum == 0.0f ? 0.0f : 1.0f / sum;
  weight1 *= inverse;
  weight2 *= inverse;
  const T* const first = row_at<T>(arguments.first, token, head);
  const T* const second = row_at<T>(arguments.second, token, head);
  T* const output = const_cast<T*>(row_at<T>(arguments.output, token, head));
  // A part without weight is not read: it may hold NaN.
  if (arguments.is_aligned) {
    using Vector = tile::Vector<T>;
    for (int32_t i = lane * Vector::kCount; i < arguments.size; i += 32 * Vector::kCount) {
      float a[Vector::kCount], b[Vector::kCount];
      tile::load_shared_by_all_if<T>(weight1 != 0.0f, first + i).unpack(a);
      tile::load_shared_by_all_if<T>(weight2 != 0.0f, second + i).unpack(b);
#pragma unroll
      for (int k = 0; k < Vector::kCount; ++k) a[k] = weight1 * a[k] + weight2 * b[k];
      tile::store(output + i, Vector::pack(a));
    }
  } else {
    for (int32_t i = lane; i < arguments.size; i += 32) {
      const float a = weight1 != 0.0f ? weight1 * tile::to_float(first[i]) : 0.0f;
      const float b = weight2 != 0.0f ? weight2 * tile::to_float(second[i]) : 0.0f;
      output[i] = tile::from_float<T>(a + b);
    }
  }
}

}  // namespace kernel_pytorch::merge_attention
