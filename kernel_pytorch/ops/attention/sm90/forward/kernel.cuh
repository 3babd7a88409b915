// Attention forward on Hopper: persistent blocks of one producer warpgroup, of which one warp drives the copy engine,
// and two or three consumer warpgroups on the tensor cores. sm_90a.
#pragma once

#include "kernel_pytorch/cuda/ptx/control.cuh"
#include "kernel_pytorch/cuda/tile/dependent_launch.cuh"
#include "kernel_pytorch/ops/attention/sm90/forward/consumer.cuh"
#include "kernel_pytorch/ops/attention/sm90/forward/producer.cuh"

namespace kernel_pytorch::attention {

// What the producer gives up and each consumer takes, a thread: together no more than the launch was given. A producer
// that reads block lists needs more of them; one whose tiles end at the diagonal alone, or
// were found ahead, can do with 24, and a consumer that changes scores and keeps queries in registers needs the rest.
template <Sm90Config kConfig, Features kFeatures>
struct Sm90Registers {
  static constexpr int kAll = kConfig.warpgroups == 2 ? 3 * 168 : 4 * 128;
  static constexpr bool kReadsLists = kFeatures.blocks;
  static constexpr bool kIsTight =
      kConfig.query_in_registers &&
      (has_spans(kFeatures) || (changes_scores(kFeatures) && kFeatures.right_bound && !kFeatures.left_bound &&
                                !kFeatures.packed && !kFeatures.key_lengths));
  static constexpr int kProducer = kReadsLists ? 56 : kConfig.warpgroups == 3 ? 32 : kIsTight ? 24 : 40;
  static constexpr int kConsumer = (kAll - kProducer) / kConfig.warpgroups;
};

template <Sm90Config kConfig>
__device__ __forceinline__ void init_barriers(Sm90Shared& shared) {
  constexpr int kConsumerWarps = 4 * kConfig.warpgroups;
  for (int i = 0; i < kConfig.query_buffers; ++i) {
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
  for (int32_t& asked : shared.redo_asked) asked = 0;
  for (int i = 0; i < kConsumerWarps; ++i) shared.memories[i] = {};
  shared.drained.init(kConsumerWarps);
  shared.redo_first = kNoTile;
}

// Result: T, or float.
template <Sm90Config kConfig, Features kFeatures, class T, class Result>
__global__ void __launch_bounds__(sm90_threads(kConfig), 1)
    sm90_forward(const __grid_constant__ Sm90ForwardArguments arguments) {
  static_assert(is_legal(kConfig));
  extern __shared__ __align__(1024) unsigned char memory[];
  Sm90Shared& shared = *reinterpret_cast<Sm90Shared*>(memory + sm90_tile_bytes(kConfig));
  if (threadIdx.x == 0) init_barriers<kConfig>(shared);
  ptx::fence_proxy_async_shared_cta();
  __syncthreads();
  tile::follow_closely();
  const uint32_t tiles = ptx::shared_address(memory);
  const int32_t warpgroup = __shfl_sync(0xffffffffu, static_cast<int32_t>(threadIdx.x / 128), 0);
  if (warpgroup == 0) {
    ptx::setmaxnreg_dec<Sm90Registers<kConfig, kFeatures>::kProducer>();
    if (threadIdx.x < 32) Sm90Producer<kConfig, kFeatures>(arguments, shared, tiles).run();
  } else {
    ptx::setmaxnreg_inc<Sm90Registers<kConfig, kFeatures>::kConsumer>();
    Sm90Consumer<kConfig, kFeatures, T, Result>(arguments, shared, tiles, warpgroup - 1).run();
  }
}

}  // namespace kernel_pytorch::attention
