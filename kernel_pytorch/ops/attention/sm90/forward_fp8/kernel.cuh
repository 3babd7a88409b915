// Attention forward in FP8 on Hopper: persistent blocks of one producer warpgroup, of which one thread drives the copy
// engine, and two consumer warpgroups on the tensor cores. sm_90a.
#pragma once

#include "kernel_pytorch/cuda/tile/dependent_launch.cuh"
#include "kernel_pytorch/ops/attention/sm90/forward_fp8/consumer.cuh"

namespace kernel_pytorch::attention::fp8 {

// What the producer gives up and each consumer takes, a thread: together no more than the launch was given.
template <ForwardConfig kConfig>
inline constexpr int kProducerRegisters = kConfig.value_size > 64 ? 24 : 40;
template <ForwardConfig kConfig>
inline constexpr int kConsumerRegisters = (3 * 168 - kProducerRegisters<kConfig>) / 2;

template <ForwardConfig kConfig>
__device__ __forceinline__ void init_barriers(Sm90Shared& shared) {
  constexpr int kConsumerWarps = 4 * kWarpgroups;
  for (int i = 0; i < kQueryBuffers; ++i) {
    shared.query_full[i].init(1);
    shared.query_empty[i].init(kConsumerWarps);
  }
  for (int i = 0; i < kConfig.stages; ++i) {
    shared.key_full[i].init(1);
    shared.key_empty[i].init(kConsumerWarps);
    shared.value_full[i].init(1);
    shared.value_empty[i].init(kConsumerWarps);
  }
  for (int i = 0; i < kSm90TileSlots; ++i) {
    shared.tile_full[i].init(1);
    shared.tile_empty[i].init(kConsumerWarps);
  }
  for (int i = 0; i < kConsumerWarps; ++i) shared.memories[i].tiles_read = 0;
}

template <ForwardConfig kConfig, Features kFeatures, class Result>
__global__ void __launch_bounds__(kThreads, 1) forward(const __grid_constant__ ForwardArguments arguments) {
  static_assert(kConfig.stages <= kSm90MaximumStages && shared_bytes(kConfig) <= kSm90SharedLimit);
  extern __shared__ __align__(1024) unsigned char memory[];
  Sm90Shared& shared = *reinterpret_cast<Sm90Shared*>(memory + tile_bytes(kConfig));
  if (threadIdx.x == 0) init_barriers<kConfig>(shared);
  ptx::fence_proxy_async_shared_cta();
  __syncthreads();
  tile::follow_closely();
  const uint32_t tiles = ptx::shared_address(memory);
  const int32_t warpgroup = __shfl_sync(0xffffffffu, static_cast<int32_t>(threadIdx.x / 128), 0);
  if (warpgroup == 0) {
    ptx::setmaxnreg_dec<kProducerRegisters<kConfig>>();
    if (threadIdx.x == 0) Producer<kConfig, kFeatures>(arguments, shared, tiles).run();
  } else {
    ptx::setmaxnreg_inc<kConsumerRegisters<kConfig>>();
    Consumer<kConfig, kFeatures, Result>(arguments, shared, tiles, warpgroup - 1).run();
  }
}

}  // namespace kernel_pytorch::attention::fp8
