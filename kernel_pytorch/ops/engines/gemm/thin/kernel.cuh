// The product of at most 16 rows with a weight whose rows lie along k, 16-bit types. Such a product is one pass over
// the weight: what counts is how many of its bytes are in flight. Warps divide k, so that a small weight too has every
// multiprocessor loading. A lane loads 16 bytes of k from rows of the weight and of a, straight into registers: mma
// sums over k in any order, so both operands may take their k from the lane's own 16 bytes. The weight is the first
// operand of mma (16 of its rows), a the second (8 of its rows). sm_80.
#pragma once

#include "kernel_pytorch/cuda/ptx/memory.cuh"
#include "kernel_pytorch/cuda/tile/dependent_launch.cuh"
#include "kernel_pytorch/cuda/tile/mma.cuh"
#include "kernel_pytorch/ops/engines/gemm/thin/sums.cuh"
#include "kernel_pytorch/ops/engines/gemm/thin/thin_cuda.h"
#include "kernel_pytorch/ops/engines/gemm/tile/finish.cuh"

namespace kernel_pytorch::product {

template <class T, ThinConfig kConfig, int kRowTiles>
class ThinProduct {
  static_assert(is_legal(kConfig));
  static constexpr int kTiles = kConfig.columns / 16;  // of the weight's rows
  static constexpr int kRows = kRowTiles * kThinRowTile;
  static constexpr int kPitch = kConfig.columns + kThinPartPadding;
  static constexpr int kStep = kThinBlock * kThinBlocks;

 public:
  using Shared = float[kConfig.warps][kRows][kPitch];

  explicit __device__ __forceinline__ ThinProduct(const TileArguments& arguments)
      : arguments_(arguments),
        lane_(static_cast<int32_t>(threadIdx.x % 32)),
        warp_(static_cast<int32_t>(threadIdx.x / 32)),
        first_column_(static_cast<int32_t>(blockIdx.x) * kConfig.columns) {}

  __device__ __forceinline__ void run(Shared& shared) {
    tile::let_next_kernel_start();
    tile::wait_for_earlier_kernels();
    float sums[kTiles][kRowTiles][4] = {};
#pragma unroll 1
    for (int32_t k = warp_ * kStep; k < arguments_.k; k += kConfig.warps * kStep) add(sums, k + lane_ % 4 * 8);
    store_thin_sums(sums, shared[warp_], lane_);
    __syncthreads();
    TileFinish finish(arguments_);
    add_thin_sums<kConfig.warps * 32, kConfig.columns>(shared,
                                                       [&](int32_t row, int32_t column, float first, float second) {
                                                         finish.finish(row, first_column_ + column, first, second);
                                                       });
  }

 private:
  // 16 bytes of row `row` at `k`; zeros outside. k is a multiple of 8 everywhere.
  __device__ __forceinline__ ptx::Word4 load(const TileOperand& operand, int32_t row, int32_t rows, int32_t k) const {
    const T* data = static_cast<const T*>(operand.data) + blockIdx.z * operand.batch;
    const int64_t line = operand.pair == 0 ? row * operand.outer : row / 2 * operand.outer + row % 2 * operand.pair;
    return ptx::ld_global_v4_if(row < rows && k < arguments_.k, data + line + k);
  }

  __device__ __forceinline__ void add(float (&sums)[kTiles][kRowTiles][4], int32_t k) const {
    ptx::Word4 weight[kThinBlocks][kTiles][2], rows[kThinBlocks][kRowTiles];
#pragma unroll
    for (int block = 0; block < kThinBlocks; ++block) {
#pragma unroll
      for (int i = 0; i < 2 * kTiles; ++i) {
        weight[block][i / 2][i % 2] =
            load(arguments_.b, first_column_ + 8 * i + lane_ / 4, arguments_.n, k + block * kThinBlock);
      }
#pragma unroll
      for (int j = 0; j < kRowTiles; ++j) {
        rows[block][j] = load(arguments_.a, 8 * j + lane_ / 4, arguments_.m, k + block * kThinBlock);
      }
    }
#pragma unroll
    for (int block = 0; block < kThinBlocks; ++block) {
#pragma unroll
      for (int i = 0; i < kTiles; ++i) {
        const ptx::Word4 &low = weight[block][i][0], &high = weight[block][i][1];
        const uint32_t first[4] = {low.x, high.x, low.y, high.y}, second[4] = {low.z, high.z, low.w, high.w};
#pragma unroll
        for (int j = 0; j < kRowTiles; ++j) {
          tile::multiply_fragments<T>(sums[i][j], first, rows[block][j].x, rows[block][j].y);
          tile::multiply_fragments<T>(sums[i][j], second, rows[block][j].z, rows[block][j].w);
        }
      }
    }
  }

  const TileArguments& arguments_;
  int32_t lane_, warp_, first_column_;
};

// 16 warps a multiprocessor leave 128 registers to a thread, two thirds of them for bytes in flight.
template <class T, ThinConfig kConfig, int kRowTiles>
__global__ void __launch_bounds__(kConfig.warps * 32, 16 / kConfig.warps)
    thin_product(const __grid_constant__ TileArguments arguments) {
  using Product = ThinProduct<T, kConfig, kRowTiles>;
  __shared__ typename Product::Shared shared;
  Product(arguments).run(shared);
}

}  // namespace kernel_pytorch::product
