// Gradients in fp32, added to what other parts of a whole gave: straight from accumulators, since the four lanes of a
// row hold a sector of 32 bytes between them. A block owns its rows, so nothing here is atomic. sm_90.
#pragma once

#include "kernel_pytorch/cuda/ptx/float_pairs.cuh"
#include "kernel_pytorch/ops/attention/sm90/backward/tile_cuda.h"

namespace kernel_pytorch::attention {

// Rows lane / 4 and lane / 4 + 8 of 16, in blocks of 8 columns: values[4 * block + 2 * half + 0 or 1].
struct GradientRows {
  float* data;  // of row 0, column 0
  int64_t row_stride;
  int32_t rows, columns;  // that exist
  bool adds;
};

template <int kCount>
__device__ __forceinline__ void store_float_gradient(const float (&values)[kCount], float scale,
                                                     const GradientRows& target, int lane) {
  constexpr int kBlocks = kCount / 4;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = lane / 4 + 8 * half;
    float* const at = target.data + row * target.row_stride + lane % 4 * 2;
    float others[kBlocks][2];  // all of a row's on their way at once
#pragma unroll
    for (int i = 0; i < kBlocks; ++i) {
      const bool is_wanted = target.adds && row < target.rows && 8 * i < target.columns;
      ptx::ld_global_v2_f32_if(is_wanted, others[i][0], others[i][1], at + 8 * i);
    }
#pragma unroll
    for (int i = 0; i < kBlocks; ++i) {
      const float* pair = values + 4 * i + 2 * half;
      ptx::st_global_v2_f32_if(row < target.rows && 8 * i < target.columns, at + 8 * i,
                               fmaf(pair[0], scale, others[i][0]), fmaf(pair[1], scale, others[i][1]));
    }
  }
}

}  // namespace kernel_pytorch::attention
