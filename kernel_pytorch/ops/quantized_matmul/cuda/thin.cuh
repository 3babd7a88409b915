// The product of at most 16 rows with a weight in few bits: one pass over the weight, as engines/gemm/thin has it for
// 16 bits. Warps divide k; a lane loads 16 bytes of codes of rows of the weight, decodes them in registers, and reads
// the same columns of x, which the caches hold. The weight is the first operand of mma, x the second. sm_80.
#pragma once

#include "kernel_pytorch/cuda/tile/dependent_launch.cuh"
#include "kernel_pytorch/cuda/tile/mma.cuh"
#include "kernel_pytorch/ops/engines/gemm/thin/sums.cuh"
#include "kernel_pytorch/ops/engines/gemm/tile/finish.cuh"
#include "kernel_pytorch/ops/quantized_matmul/cuda/weight.cuh"

namespace kernel_pytorch::quantized_matmul {

template <class T, Format kFormat, ThinConfig kConfig, int kRowTiles>
class ThinProduct {
  static_assert(is_legal(kConfig));
  using Chunk = WeightChunk<T, kFormat>;
  static constexpr int kTiles = kConfig.columns / 16;
  static constexpr int kRows = kRowTiles * 8;
  static constexpr int kPitch = kConfig.columns + kPartPadding;
  static constexpr int kSpan = span_of(kFormat);

 public:
  using Shared = float[kConfig.warps][kRows][kPitch];

  explicit __device__ __forceinline__ ThinProduct(const Arguments& arguments)
      : arguments_(arguments),
        lane_(static_cast<int32_t>(threadIdx.x % 32)),
        warp_(static_cast<int32_t>(threadIdx.x / 32)),
        first_column_(static_cast<int32_t>(blockIdx.x) * kConfig.columns) {}

  __device__ __forceinline__ void run(Shared& shared) {
    tile::let_next_kernel_start();
    tile::wait_for_earlier_kernels();
    float sums[kTiles][kRowTiles][4] = {};
    constexpr int kStep = kSpan * kConfig.blocks;
#pragma unroll 1
    for (int32_t k = warp_ * kStep; k < arguments_.tile.k; k += kConfig.warps * kStep) add(sums, k);
    product::store_thin_sums(sums, shared[warp_], lane_);
    __syncthreads();
    product::TileFinish finish(arguments_.tile);
    const float factor = factor_of<kFormat>(arguments_.weight);
    product::add_thin_sums<kConfig.warps * 32, kConfig.columns>(
        shared, [&](int32_t row, int32_t column, float first, float second) {
          finish.finish(row, first_column_ + column, first * factor, second * factor);
        });
  }

 private:
  __device__ __forceinline__ void add(float (&sums)[kTiles][kRowTiles][4], int32_t first_k) const {
    const product::TileArguments& tile = arguments_.tile;
    const int32_t lane_k = first_k + lane_ % 4 * (kSpan / 4);
    Chunk chunks[kConfig.blocks][2 * kTiles];
#pragma unroll
    for (int block = 0; block < kConfig.blocks; ++block) {
#pragma unroll
      for (int i = 0; i < 2 * kTiles; ++i) {
        chunks[block][i].load(arguments_.weight, first_column_ + 8 * i + lane_ / 4, tile.n, lane_k + block * kSpan,
                              tile.k);
      }
    }
#pragma unroll
    for (int block = 0; block < kConfig.blocks; ++block) {
      typename Chunk::Factors factors[2 * kTiles];
#pragma unroll
      for (int i = 0; i < 2 * kTiles; ++i) factors[i] = chunks[block][i].factors();
#pragma unroll
      for (int word = 0; word < Chunk::kWords; ++word) {
        const int32_t k = lane_k + block * kSpan + 8 * word;
        uint32_t x[kRowTiles][4];
#pragma unroll
        for (int j = 0; j < kRowTiles; ++j) {
          const int32_t row = 8 * j + lane_ / 4;
          order_pairs<kFormat>(ptx::ld_global_v4_if(row < tile.m && k < tile.k,
                                                    static_cast<const T*>(tile.a.data) + row * tile.a.outer + k),
                               x[j]);
        }
#pragma unroll
        for (int i = 0; i < kTiles; ++i) {
          uint32_t low[4], high[4];
          chunks[block][2 * i].decode(word, factors[2 * i], low);
          chunks[block][2 * i + 1].decode(word, factors[2 * i + 1], high);
          const uint32_t first[4] = {low[0], high[0], low[1], high[1]}, second[4] = {low[2], high[2], low[3], high[3]};
#pragma unroll
          for (int j = 0; j < kRowTiles; ++j) {
            tile::multiply_fragments<T>(sums[i][j], first, x[j][0], x[j][1]);
            tile::multiply_fragments<T>(sums[i][j], second, x[j][2], x[j][3]);
          }
        }
      }
    }
  }

  const Arguments& arguments_;
  int32_t lane_, warp_, first_column_;
};

// 16 warps a multiprocessor leave 128 registers to a thread.
template <class T, Format kFormat, ThinConfig kConfig, int kRowTiles>
__global__ void __launch_bounds__(kConfig.warps * 32, 16 / kConfig.warps)
    thin_product(const __grid_constant__ Arguments arguments) {
  using Product = ThinProduct<T, kFormat, kConfig, kRowTiles>;
  __shared__ typename Product::Shared shared;
  Product(arguments).run(shared);
}

}  // namespace kernel_pytorch::quantized_matmul
