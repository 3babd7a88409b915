// A matrix product on Hopper: persistent blocks of one producer warpgroup, of which one thread drives the copy engine,
// and two consumer warpgroups on the tensor cores; pairs of blocks share what they read. sm_90a.
#pragma once

#include "kernel_pytorch/cuda/ptx/control.cuh"
#include "kernel_pytorch/cuda/tile/dependent_launch.cuh"
#include "kernel_pytorch/ops/engines/gemm/sm90/consumer.cuh"
#include "kernel_pytorch/ops/engines/gemm/sm90/grouped_producer.cuh"
#include "kernel_pytorch/ops/engines/gemm/sm90/producer.cuh"

namespace kernel_pytorch::product {

// What the producer gives up and each consumer takes, a thread: together no more than the launch was given, or they
// wait for ever. A launch is given what its bound on threads leaves: 168, or 128 where sums are few, so that its blocks
// can start while small blocks of the previous kernel still run.
template <Sm90Config kConfig, Sm90Operands kOperands, Sm90Epilogue kEpilogue>
struct Sm90Registers {
  static constexpr bool kIsLean = kConfig.tile_m * kConfig.tile_n <= 128 * 128 && !kConfig.factors &&
                                  !kEpilogue.promoted && !copies_lines(kOperands);
  static constexpr int kBoundThreads = kIsLean ? 512 : kSm90Threads;
  static constexpr int kLaunched = 65536 / kBoundThreads / 8 * 8;
  static constexpr int kProducer = kIsLean ? 24 : copies_lines(kOperands) ? 56 : 40;
  static constexpr int kConsumer = kIsLean ? 176 : copies_lines(kOperands) ? 224 : 232;
  static_assert(kProducer + kSm90Warpgroups * kConsumer <= (1 + kSm90Warpgroups) * kLaunched);
};

template <Sm90Config kConfig>
__device__ __forceinline__ void synchronize_cluster() {
  if constexpr (kConfig.cluster == 1) {
    __syncthreads();
  } else {
    ptx::barrier_cluster_arrive();
    ptx::barrier_cluster_wait();
  }
}

template <Sm90Config kConfig, Sm90Operands kOperands, Sm90Epilogue kEpilogue, class Out>
__global__ void __launch_bounds__(Sm90Registers<kConfig, kOperands, kEpilogue>::kBoundThreads, 1)
    sm90_product(const __grid_constant__ Sm90Arguments arguments) {
  static_assert(is_legal(kConfig));
  extern __shared__ __align__(1024) unsigned char memory[];
  Sm90Shared& shared = *reinterpret_cast<Sm90Shared*>(memory + sm90_barriers_at(kConfig));
  static_assert(sizeof(Sm90Shared) <= kSm90BarrierBytes);
  if (threadIdx.x == 0) {
    for (int i = 0; i < kConfig.stages; ++i) {
      // Each thread that copies lines or factors arrives.
      shared.full[i].init(1 + (copies_lines(kOperands) ? 128 : kConfig.factors ? 32 : 0));
      shared.empty[i].init(4 * kSm90Warpgroups * sm90_sharing(kConfig));
    }
    if constexpr (kConfig.splits) Sm90Exchange<kConfig>::init(shared);
  }
  ptx::fence_proxy_async_shared_cta();
  synchronize_cluster<kConfig>();
  tile::let_next_kernel_start();
  tile::wait_for_earlier_kernels();
  if constexpr (kOperands.a == Sm90Type::kFloat32Parts) {
    if (*arguments.careful != 0) return;
  }
  const uint32_t tiles = ptx::shared_address(memory);
  const int32_t warpgroup = __shfl_sync(0xffffffffu, static_cast<int32_t>(threadIdx.x / 128), 0);
  if (warpgroup == 0) {
    ptx::setmaxnreg_dec<Sm90Registers<kConfig, kOperands, kEpilogue>::kProducer>();
    constexpr bool kThin = kEpilogue.scaling == Sm90Scaling::kThinBlocks;
    if constexpr (kOperands.grouping != Sm90Grouping::kNone) {
      if (copies_lines(kOperands) || threadIdx.x == 0) {
        Sm90GroupedProducer<kConfig, kOperands, kThin>(arguments, shared, tiles).run();
      }
    } else {
      if (threadIdx.x == 0) Sm90Producer<kConfig, kOperands>(arguments, shared, tiles).run();
    }
    if constexpr (kConfig.factors && !copies_lines(kOperands)) {
      if (threadIdx.x / 32 == 1) Sm90FactorProducer<kConfig, kOperands, kThin>(arguments, shared, tiles).run();
    }
    __syncwarp();
  } else {
    ptx::setmaxnreg_inc<Sm90Registers<kConfig, kOperands, kEpilogue>::kConsumer>();
    Sm90Consumer<kConfig, kOperands, kEpilogue, Out>(arguments, shared, tiles, warpgroup - 1).run();
  }
  // A block must not end while the other may still write into its memory or arrive at its barriers.
  if constexpr (kConfig.cluster > 1) synchronize_cluster<kConfig>();
}

}  // namespace kernel_pytorch::product
