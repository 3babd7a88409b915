// A block's product of 128 x 128 by MFMA: four waves of 64 x 64, in tiles of 16 x 16 x 16. An MFMA is an instruction of
// a whole wave, whatever lanes are switched off: the two warps of a wave have to be at the same place, which they are
// where all warps of a block do the same, as here. Before gfx90a it is mma's form, by FMA.
#pragma once

#include "kernel_pytorch/cuda/tile/mma_block.cuh"

namespace kernel_pytorch::tile {

#ifdef KP_HAS_MFMA
template <class T>
__device__ __forceinline__ void multiply_wave(float (&sum)[4], uint64_t a, uint64_t b);
template <>
__device__ __forceinline__ void multiply_wave<BFloat16>(float (&sum)[4], uint64_t a, uint64_t b) {
  hip::mfma_16x16x16_f32_bf16(sum, a, b);
}
template <>
__device__ __forceinline__ void multiply_wave<Float16>(float (&sum)[4], uint64_t a, uint64_t b) {
  hip::mfma_16x16x16_f32_f16(sum, a, b);
}

template <class T, class LayoutA, class LayoutB>
class WaveBlock {
 public:
  __device__ __forceinline__ void add(uint32_t stage_a, uint32_t stage_b, int k) {
    uint64_t of_a[4], of_b[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      of_a[i] = four<LayoutA>(stage_a, wave() / 2 * 64 + 16 * i, k);
      of_b[i] = four<LayoutB>(stage_b, wave() % 2 * 64 + 16 * i, k);
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
#pragma unroll
      for (int j = 0; j < 4; ++j) multiply_wave<T>(sums_[i][j], of_a[i], of_b[j]);
    }
  }

  __device__ __forceinline__ void store(float (&finished)[64][128], int half) const {
    if (wave() / 2 != half) return;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        // A lane's sums are four rows of one column.
#pragma unroll
        for (int r = 0; r < 4; ++r) {
          finished[16 * i + lane() / 16 * 4 + r][wave() % 2 * 64 + 16 * j + lane() % 16] = sums_[i][j][r];
        }
      }
    }
  }

 private:
  static __device__ __forceinline__ int wave() {
    return static_cast<int>(threadIdx.x / 64);
  }
  static __device__ __forceinline__ int lane() {
    return static_cast<int>(threadIdx.x % 64);
  }

  // A lane's part of 16 rows by 16 of k, of either operand: row lane % 16, four of k from lane / 16 * 4 on.
  template <class Layout>
  static __device__ __forceinline__ uint64_t four(uint32_t stage, int first_row, int first_k) {
    const int row = first_row + lane() % 16, k = first_k + lane() / 16 * 4;
    if constexpr (Layout::kAcross) {
      uint64_t bits = 0;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        bits |= uint64_t{*ptx::shared_place<const uint16_t>(stage + (k + i) * Layout::kPitch + row * 2)} << (16 * i);
      }
      return bits;
    } else {
      return *ptx::shared_place<const uint64_t>(stage + row * Layout::kPitch + k * 2);
    }
  }

  float sums_[4][4][4] = {};
};

template <class T, class LayoutA, class LayoutB>
using BlockProduct = WaveBlock<T, LayoutA, LayoutB>;
#else
template <class T, class LayoutA, class LayoutB>
using BlockProduct = MmaBlock<T, LayoutA, LayoutB>;
#endif

}  // namespace kernel_pytorch::tile
