// What a consumer warpgroup of the Hopper forward does to tiles in shared memory apart from its products.
#pragma once

#include "kernel_pytorch/cuda/ptx/control.cuh"
#include "kernel_pytorch/cuda/ptx/matrix_move.cuh"
#include "kernel_pytorch/cuda/ptx/named_barrier.cuh"
#include "kernel_pytorch/cuda/tile/fragment.cuh"
#include "kernel_pytorch/ops/attention/sm90/forward/tile_cuda.h"

namespace kernel_pytorch::attention {

// A warp's 16 rows of queries as operands of products.
template <int kQueries, int kWords>
__device__ __forceinline__ void load_query_words(uint32_t (&words)[kWords], uint32_t tile, int32_t warp_row) {
  uint32_t lane[1] = {threadIdx.x % 32};
  ptx::tie_registers(lane);  // the addresses that follow from it must not be kept from tile to tile
#pragma unroll
  for (int k = 0; k < kWords / 4; ++k) {
    uint32_t block[4];
    ptx::ldmatrix_x4(block, tile::fragment_address<kQueries>(tile, warp_row, k, lane[0]));
#pragma unroll
    for (int i = 0; i < 4; ++i) words[4 * k + i] = block[i];
  }
}

// Values beyond the last key belong to another sequence or to none, and may hold anything: their probability is zero,
// but zero times NaN is NaN. Every warpgroup clears them for itself, so that none waits for another.
template <Sm90Config kConfig>
__device__ __forceinline__ void clear_values(uint32_t values, int32_t first_row, int32_t warpgroup) {
  constexpr int kKeys = kConfig.key_block;
  for (int chunk = 0; chunk < sm90_chunks(kConfig.value_size); ++chunk) {
    const int32_t end = (chunk + 1) * kKeys * tile::kChunkRowBytes;
    int32_t at = (chunk * kKeys + first_row) * tile::kChunkRowBytes + static_cast<int32_t>(threadIdx.x % 128) * 16;
    for (; at < end; at += 128 * 16) ptx::st_shared_v4(values + at, {0, 0, 0, 0});
  }
  ptx::fence_proxy_async_shared_cta();
  ptx::barrier_sync_aligned(1 + kConfig.warpgroups + warpgroup, 128);
}

}  // namespace kernel_pytorch::attention
