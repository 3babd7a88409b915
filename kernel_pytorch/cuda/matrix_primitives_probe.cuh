// Probe kernels of matrix_words_test.cpp: tiles through the copy engine, matrix moves and wgmma. sm_90a.
#pragma once

#include "kernel_pytorch/cuda/ptx/bulk_copy.cuh"
#include "kernel_pytorch/cuda/ptx/control.cuh"
#include "kernel_pytorch/cuda/ptx/matrix_move.cuh"
#include "kernel_pytorch/cuda/ptx/named_barrier.cuh"
#include "kernel_pytorch/cuda/ptx/tensor_copy.cuh"
#include "kernel_pytorch/cuda/tile/barrier.cuh"
#include "kernel_pytorch/cuda/tile/fragment.cuh"
#include "kernel_pytorch/cuda/tile/matrix_descriptor.cuh"
#include "kernel_pytorch/cuda/tile/tensor_map_cuda.h"

namespace kernel_pytorch::primitives_probe {

template <class T>
inline constexpr ptx::WgmmaType kWgmmaType = ptx::WgmmaType::kBf16;
template <>
inline constexpr ptx::WgmmaType kWgmmaType<tile::Float16> = ptx::WgmmaType::kF16;

// Loads a [kRows][kColumns] tile of a 4-D tensor whose leading coordinates are (last, first), chunk by chunk.
template <int kRows, int kColumns>
__device__ __forceinline__ void load_tile(uint32_t tile, const tile::TensorMap& map, int row, int outer,
                                          tile::Barrier& barrier) {
  constexpr int kChunks = (kColumns + tile::kChunkColumns - 1) / tile::kChunkColumns;
  constexpr int kChunkBytes = kRows * tile::kChunkRowBytes;
  ptx::prefetch_tensormap(&map);
  barrier.arrive_expect_bytes(kChunks * kChunkBytes);
  for (int chunk = 0; chunk < kChunks; ++chunk) {
    ptx::cp_async_bulk_tensor_4d_shared_global(tile + chunk * kChunkBytes, &map, chunk * tile::kChunkColumns, row, 0,
                                               outer, barrier.address());
  }
}

// product[64][kColumns] = a[64][kDepth] b, where b is [kColumns][kDepth] (kAlongRows: [kDepth][kColumns]), twice: the
// second time added to the first. One warpgroup.
template <class T, int kColumns, int kDepth, bool kAlongRows, bool kFromRegisters>
__global__ void __launch_bounds__(128, 1)
    multiply_tiles(const __grid_constant__ tile::TensorMap a_map, const __grid_constant__ tile::TensorMap b_map,
                   float* product) {
  extern __shared__ __align__(1024) unsigned char memory[];
  __shared__ tile::Barrier arrived;
  using Mma = ptx::Wgmma<kColumns, kWgmmaType<T>>;
  constexpr int kSteps = kDepth / tile::kProductDepth;
  const uint32_t a = ptx::shared_address(memory);
  const uint32_t b = a + (kDepth + 63) / 64 * 64 * tile::kChunkRowBytes;
  if (threadIdx.x == 0) arrived.init(2);
  __syncthreads();
  if (threadIdx.x == 0) {
    load_tile<64, kDepth>(a, a_map, 0, 0, arrived);
    load_tile<kAlongRows ? kDepth : kColumns, kAlongRows ? kColumns : kDepth>(b, b_map, 0, 0, arrived);
  }
  arrived.wait(0);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  float d[Mma::kCount];
  uint32_t fragments[4 * kSteps];
  for (int k = 0; k < kSteps; ++k) {
    uint32_t(&block)[4] = reinterpret_cast<uint32_t(&)[4]>(fragments[4 * k]);
    ptx::ldmatrix_x4(block, tile::fragment_address<64>(a, warp * 16, k, lane));
  }
  for (int round = 0; round < 2; ++round) {
    using A = tile::AlongColumns<64>;
    ptx::wgmma_fence();
    if constexpr (kAlongRows) {
      using B = tile::AlongRows<kDepth>;
      if constexpr (kFromRegisters) tile::multiply<Mma, B, kSteps>(d, fragments, B::base(b), round > 0);
      if constexpr (!kFromRegisters) tile::multiply<Mma, A, B, kSteps>(d, A::base(a), B::base(b), round > 0);
    } else {
      using B = tile::AlongColumns<kColumns>;
      if constexpr (kFromRegisters) tile::multiply<Mma, B, kSteps>(d, fragments, B::base(b), round > 0);
      if constexpr (!kFromRegisters) tile::multiply<Mma, A, B, kSteps>(d, A::base(a), B::base(b), round > 0);
    }
    ptx::wgmma_commit_group();
    ptx::wgmma_wait_group<0>();
    ptx::tie_registers(d);
  }
  for (int i = 0; i < Mma::kCount; ++i) {
    product[(warp * 16 + tile::fragment_row(lane, i)) * kColumns + tile::fragment_column(lane, i)] = d[i];
  }
}

// Copies matrix `outer` of source to target, 64 x 64 elements at (row, 0), by fragments; transposed: every 8 x 8 of
// them.
template <bool kTransposed>
__global__ void __launch_bounds__(128, 1)
    move_fragments(const __grid_constant__ tile::TensorMap source, const __grid_constant__ tile::TensorMap target,
                   int row, int outer) {
  extern __shared__ __align__(1024) unsigned char memory[];
  __shared__ tile::Barrier arrived;
  const uint32_t in = ptx::shared_address(memory), out = in + 64 * tile::kChunkRowBytes;
  if (threadIdx.x == 0) arrived.init(1);
  __syncthreads();
  if (threadIdx.x == 0) load_tile<64, 64>(in, source, row, outer, arrived);
  arrived.wait(0);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  for (int block = 0; block < 4; ++block) {
    uint32_t words[4];
    const uint32_t from = tile::fragment_address<64>(in, warp * 16, block, lane);
    const uint32_t to = tile::fragment_address<64>(out, warp * 16, block, lane);
    if constexpr (kTransposed) {
      ptx::ldmatrix_x4_trans(words, from);
    } else {
      ptx::ldmatrix_x4(words, from);
    }
    ptx::stmatrix_x4(to, words);
  }
  ptx::fence_proxy_async_shared_cta();
  __syncthreads();
  if (threadIdx.x == 0) {
    ptx::cp_async_bulk_tensor_3d_global_shared(&target, 0, row, outer, out);
    ptx::cp_async_bulk_commit_group();
    ptx::cp_async_bulk_wait_group<0>();
  }
}

// Two warpgroups count in turns through named barriers, after handing registers over; every thread then adds its four
// numbers to `sums`.
__global__ void __launch_bounds__(256, 1) take_turns(int32_t* order, float* sums, int rounds) {
  const int group = threadIdx.x / 128;
  if (group == 0) {
    ptx::setmaxnreg_dec<64>();
    for (int round = 0; round < rounds; ++round) {
      if (threadIdx.x % 128 == 0) order[0] = order[0] * 2 + 1;
      __threadfence_block();
      ptx::barrier_arrive_aligned(1, 256);
      ptx::barrier_sync_aligned(2, 256);
    }
  } else {
    ptx::setmaxnreg_inc<160>();
    for (int round = 0; round < rounds; ++round) {
      ptx::barrier_sync_aligned(1, 256);
      if (threadIdx.x % 128 == 0) order[0] = order[0] * 2;
      __threadfence_block();
      ptx::barrier_arrive_aligned(2, 256);
    }
  }
  const float i = static_cast<float>(threadIdx.x);
  ptx::red_global_add_v4_f32(sums, 1.0f, i, 2.0f * i, -1.0f);
}

}  // namespace kernel_pytorch::primitives_probe
