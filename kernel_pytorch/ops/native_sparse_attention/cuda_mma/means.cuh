// Means of blocks as elements. sm_80.
#pragma once

#include "kernel_pytorch/ops/native_sparse_attention/cuda/common.cuh"
#include "kernel_pytorch/ops/native_sparse_attention/cuda_mma/arguments_mma_cuda.h"

namespace kernel_pytorch::native_sparse_attention {

// Means of blocks, rounded to elements; rows that no sequence has are zeros.
template <class Element>
__global__ void __launch_bounds__(kMmaThreads) compress_elements(const __grid_constant__ MmaArguments arguments) {
  const Arguments& a = arguments.all;
  const auto row = static_cast<int32_t>(blockIdx.x % a.compressed);
  const auto head = static_cast<int32_t>(blockIdx.x / a.compressed % a.key_heads);
  const auto batch = static_cast<int32_t>(blockIdx.x / a.compressed / a.key_heads);
  const int32_t first = first_of_mean(a, row);
  const float share = 1.0f / static_cast<float>(a.compress_block);
  for (auto i = static_cast<int32_t>(threadIdx.x); i < a.size + a.value_size; i += kMmaThreads) {
    const bool is_key = i < a.size;
    const Rows& from = is_key ? a.key : a.value;
    const int32_t column = is_key ? i : i - a.size;
    float sum = 0;
#pragma unroll 4
    for (int32_t k = 0; first >= 0 && k < a.compress_block; ++k) {
      sum += tile::to_float(row_at<Element>(from, batch, first + k, head)[column]);
    }
    result_at<Element>(is_key ? a.means_of_key : a.means_of_value, batch, row, head)[column] =
        tile::from_float<Element>(sum * share);
  }
}

}  // namespace kernel_pytorch::native_sparse_attention
