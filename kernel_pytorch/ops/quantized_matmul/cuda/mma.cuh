// The product of more than 16 rows with a weight in few bits: four warps share 64 rows of x, which cp.async puts into a
// ring of stages in shared memory; each has 16 or 32 columns of the output, loads their codes a step ahead straight
// into registers and decodes them there, once for the 64 rows. The weight is the first operand of mma, x the second.
// sm_80.
#pragma once

#include "kernel_pytorch/cuda/ptx/async_copy.cuh"
#include "kernel_pytorch/cuda/tile/mma.cuh"
#include "kernel_pytorch/ops/engines/gemm/thin/sums.cuh"
#include "kernel_pytorch/ops/engines/gemm/tile/finish.cuh"
#include "kernel_pytorch/ops/quantized_matmul/cuda/weight.cuh"

namespace kernel_pytorch::quantized_matmul {

template <class T, Format kFormat, MmaConfig kConfig>
class MmaProduct {
  static_assert(is_legal(kConfig));
  using Chunk = WeightChunk<T, kFormat>;
  static constexpr int kTiles = kConfig.columns / 64;  // of 16 columns, of a warp
  static constexpr int kRowTiles = kMmaRows / 8;
  static constexpr int kSpan = span_of(kFormat), kPitch = mma_pitch(kFormat);
  static constexpr int kStageBytes = kMmaRows * kPitch;
  static constexpr int kUnits = kSpan / 8;  // 16-byte units of a row of x

 public:
  explicit __device__ __forceinline__ MmaProduct(const Arguments& arguments)
      : arguments_(arguments),
        lane_(static_cast<int32_t>(threadIdx.x % 32)),
        warp_(static_cast<int32_t>(threadIdx.x / 32)),
        first_column_(static_cast<int32_t>(blockIdx.x) * kConfig.columns),
        first_row_(static_cast<int32_t>(blockIdx.y) * kMmaRows) {}

  __device__ __forceinline__ void run(unsigned char* memory) {
    const uint32_t stages = ptx::shared_address(memory);
    const int32_t steps = (arguments_.tile.k + kSpan - 1) / kSpan;
    for (int i = 0; i < kMmaStages - 1; ++i) load_x(stages, i, steps);
    Chunk chunks[2 * kTiles];
    load_codes(chunks, 0);
    float sums[kTiles][kRowTiles][4] = {};
#pragma unroll 1
    for (int32_t step = 0; step < steps; ++step) {
      ptx::cp_async_wait_group<kMmaStages - 2>();
      __syncthreads();
      load_x(stages, step + kMmaStages - 1, steps);  // into the stage that all warps have read
      Chunk next[2 * kTiles];
      load_codes(next, step + 1);
      multiply(sums, chunks, stages + step % kMmaStages * kStageBytes);
#pragma unroll
      for (int i = 0; i < 2 * kTiles; ++i) chunks[i] = next[i];
    }
    ptx::cp_async_wait_group<0>();
    __syncthreads();
    finish(sums, *reinterpret_cast<float(*)[kMmaRows][kConfig.columns + kPartPadding]>(memory));
  }

 private:
  // Unit 4 * word + lane of a row are the eight columns number `word` of the 16 bytes of codes that a lane has.
  __device__ __forceinline__ void load_x(uint32_t stages, int32_t step, int32_t steps) const {
    if (step < steps) {
      const product::TileArguments& tile = arguments_.tile;
      const T* data = static_cast<const T*>(tile.a.data);
#pragma unroll
      for (int i = 0; i < kMmaRows * kUnits / kMmaThreads; ++i) {
        const int32_t index = static_cast<int32_t>(threadIdx.x) + i * kMmaThreads;
        const int32_t line = index / kUnits, unit = index % kUnits;
        const int32_t row = first_row_ + line, k = step * kSpan + unit * 8;
        const bool is_inside = row < tile.m && k < tile.k;
        const int32_t place = unit % Chunk::kWords * 4 + unit / Chunk::kWords;
        ptx::cp_async_cg_shared_global_16_fill(stages + step % kMmaStages * kStageBytes + line * kPitch + place * 16,
                                               is_inside ? data + row * tile.a.outer + k : data, is_inside ? 16 : 0);
      }
    }
    ptx::cp_async_commit_group();
  }

  __device__ __forceinline__ void load_codes(Chunk (&chunks)[2 * kTiles], int32_t step) const {
#pragma unroll
    for (int i = 0; i < 2 * kTiles; ++i) {
      chunks[i].load(arguments_.weight, first_column_ + warp_ * 16 * kTiles + 8 * i + lane_ / 4, arguments_.tile.n,
                     step * kSpan + lane_ % 4 * (kSpan / 4), arguments_.tile.k);
    }
  }

  __device__ __forceinline__ void multiply(float (&sums)[kTiles][kRowTiles][4], const Chunk (&chunks)[2 * kTiles],
                                           uint32_t stage) const {
    typename Chunk::Factors factors[2 * kTiles];
#pragma unroll
    for (int i = 0; i < 2 * kTiles; ++i) factors[i] = chunks[i].factors();
#pragma unroll
    for (int word = 0; word < Chunk::kWords; ++word) {
      uint32_t first[kTiles][4], second[kTiles][4];
#pragma unroll
      for (int i = 0; i < kTiles; ++i) {
        uint32_t low[4], high[4];
        chunks[2 * i].decode(word, factors[2 * i], low);
        chunks[2 * i + 1].decode(word, factors[2 * i + 1], high);
#pragma unroll
        for (int r = 0; r < 4; ++r) {
          first[i][r] = r % 2 == 0 ? low[r / 2] : high[r / 2];
          second[i][r] = r % 2 == 0 ? low[2 + r / 2] : high[2 + r / 2];
        }
      }
#pragma unroll
      for (int j = 0; j < kRowTiles; ++j) {
        uint32_t x[4];
        order_pairs<kFormat>(ptx::ld_shared_v4(stage + (8 * j + lane_ / 4) * kPitch + (4 * word + lane_ % 4) * 16), x);
#pragma unroll
        for (int i = 0; i < kTiles; ++i) {
          tile::multiply_fragments<T>(sums[i][j], first[i], x[0], x[1]);
          tile::multiply_fragments<T>(sums[i][j], second[i], x[2], x[3]);
        }
      }
    }
  }

  __device__ __forceinline__ void finish(const float (&sums)[kTiles][kRowTiles][4],
                                         float (&part)[kMmaRows][kConfig.columns + kPartPadding]) const {
    product::store_thin_sums(sums, part, lane_, warp_ * kTiles * 16);
    __syncthreads();
    product::TileFinish finish(arguments_.tile);
    const float factor = factor_of<kFormat>(arguments_.weight);
#pragma unroll 1
    for (int32_t pair = threadIdx.x; pair < kMmaRows * kConfig.columns / 2; pair += kMmaThreads) {
      const int32_t row = pair / (kConfig.columns / 2), column = pair % (kConfig.columns / 2) * 2;
      finish.finish(first_row_ + row, first_column_ + column, part[row][column] * factor,
                    part[row][column + 1] * factor);
    }
  }

  const Arguments& arguments_;
  int32_t lane_, warp_, first_column_, first_row_;
};

template <class T, Format kFormat, MmaConfig kConfig>
__global__ void __launch_bounds__(kMmaThreads, 2) mma_product(const __grid_constant__ Arguments arguments) {
  extern __shared__ __align__(16) unsigned char memory[];
  MmaProduct<T, kFormat, kConfig>(arguments).run(memory);
}

}  // namespace kernel_pytorch::quantized_matmul
