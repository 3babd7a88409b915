// A matrix product of fp64 by the tensor cores' mma of doubles: blocks of 128 x 64, eight warps of 32 x 32, a ring of
// stages that each thread fills by cp.async, an element at a time, so that operands may lie in any order and begin
// anywhere. sm_80. Written without a GPU at hand: it has run on the emulated one alone (engines/gemm/NOTES.md).
#pragma once

#include "kernel_pytorch/cuda/ptx/async_copy.cuh"
#include "kernel_pytorch/cuda/ptx/memory.cuh"
#include "kernel_pytorch/cuda/tile/double_fragments.cuh"
#include "kernel_pytorch/ops/engines/gemm/tile/kernel.cuh"

namespace kernel_pytorch::product {

// A stage of an operand is [kRows][depth] whatever its order in memory; threads walk along its dense dimension.
template <int kRows>
__device__ __forceinline__ void load_doubles(const TileOperand& operand, int32_t first, int32_t rows, int32_t depth,
                                             int32_t k, uint32_t target) {
  const double* data = static_cast<const double*>(operand.data) + blockIdx.z * operand.batch;
  const bool along_k = operand.inner == 1;
#pragma unroll
  for (int i = 0; i < kRows * kDoubleDepth / kTileThreads; ++i) {
    const int32_t index = static_cast<int32_t>(threadIdx.x) + i * kTileThreads;
    const int32_t row = along_k ? index / kDoubleDepth : index % kRows;
    const int32_t at = along_k ? index % kDoubleDepth : index / kRows;
    const bool is_inside = first + row < rows && k + at < depth;
    const double* source = is_inside ? data + (first + row) * operand.outer + (k + at) * operand.inner : data;
    ptx::cp_async_ca_shared_global_8_fill(target + (row * kDoublePitch + at) * 8, source, is_inside ? 8u : 0u);
  }
}

template <int kStages>
__global__ void __launch_bounds__(kTileThreads, 1) double_product(const __grid_constant__ TileArguments arguments) {
  extern __shared__ __align__(16) unsigned char memory[];
  const auto* values = reinterpret_cast<const double*>(memory);
  const uint32_t stages = ptx::shared_address(memory);
  const int32_t first_row = static_cast<int32_t>(blockIdx.y) * kDoubleRows;
  const int32_t first_column = static_cast<int32_t>(blockIdx.x) * kDoubleColumns;
  const int thread = static_cast<int>(threadIdx.x), warp = thread / 32, lane = thread % 32;
  const int warp_row = warp / 2 * 32, warp_column = warp % 2 * 32;
  const int32_t steps = (arguments.k + kDoubleDepth - 1) / kDoubleDepth;
  const auto load = [&](int32_t step) {
    if (step < steps) {
      const uint32_t target = stages + step % kStages * kDoubleStageBytes;
      const int32_t k = step * kDoubleDepth;
      load_doubles<kDoubleRows>(arguments.a, first_row, arguments.m, arguments.k, k, target);
      load_doubles<kDoubleColumns>(arguments.b, first_column, arguments.n, arguments.k, k,
                                   target + kDoubleRows * kDoublePitch * 8);
    }
    ptx::cp_async_commit_group();
  };
  for (int i = 0; i < kStages - 1; ++i) load(i);
  double sums[2][4][4] = {};
  double row_sum = 0.0;
  const bool sums_rows = arguments.row_sums.data != nullptr && blockIdx.x == 0 && thread < kDoubleRows;
#pragma unroll 1
  for (int32_t step = 0; step < steps; ++step) {
    ptx::cp_async_wait_group<kStages - 2>();
    __syncthreads();
    load(step + kStages - 1);  // into the stage that all warps have read
    const double* a = values + step % kStages * (kDoubleStageBytes / 8);
    const double* b = a + kDoubleRows * kDoublePitch;
    if (sums_rows) {
      for (int k = 0; k < kDoubleDepth; ++k) row_sum += a[thread * kDoublePitch + k];
    }
#pragma unroll
    for (int k = 0; k < kDoubleDepth; k += 4) {
      const double* of_lane = a + (warp_row + lane / 4) * kDoublePitch + k + lane % 4;
      double left[2][2];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        left[i][0] = of_lane[16 * i * kDoublePitch];
        left[i][1] = of_lane[(16 * i + 8) * kDoublePitch];
      }
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const double right = b[(warp_column + 8 * j + lane / 4) * kDoublePitch + k + lane % 4];
#pragma unroll
        for (int i = 0; i < 2; ++i) tile::multiply_doubles(sums[i][j], left[i], right);
      }
    }
  }
  ptx::cp_async_wait_group<0>();
  if (sums_rows && first_row + thread < arguments.m) {
    store_any(arguments.row_sums, blockIdx.z * arguments.row_sums.batch + first_row + thread, row_sum);
  }
  auto& finished = *reinterpret_cast<double(*)[kTileRowsAtOnce][kDoubleColumns]>(memory);
#pragma unroll 1
  for (int first = 0; first < kDoubleRows; first += kTileRowsAtOnce) {
    __syncthreads();
    if (warp_row / kTileRowsAtOnce * kTileRowsAtOnce == first) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
#pragma unroll
        for (int j = 0; j < 4; ++j) {
#pragma unroll
          for (int r = 0; r < 4; ++r) {
            finished[warp_row % kTileRowsAtOnce + 16 * i + lane / 4 + r / 2 * 8]
                    [warp_column + 8 * j + lane % 4 * 2 + r % 2] = sums[i][j][r];
          }
        }
      }
    }
    __syncthreads();
    finish_rows(arguments, finished, first_row + first, first_column);
  }
}

}  // namespace kernel_pytorch::product
