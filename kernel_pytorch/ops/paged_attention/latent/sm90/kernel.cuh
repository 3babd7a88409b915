// Attention over latent rows (MLA) on Hopper, by wgmma: a warpgroup copies keys, two multiply (consumer.cuh). A key is
// its latent row (512 columns) followed by its rope row (64); the latent row is the value too, and read once.
#pragma once

#include "kernel_pytorch/cuda/tile/dependent_launch.cuh"
#include "kernel_pytorch/ops/paged_attention/latent/sm90/consumer.cuh"
#include "kernel_pytorch/ops/paged_attention/latent/sm90/copy.cuh"

namespace kernel_pytorch::paged_attention {

inline constexpr int kLatentCopyRegisters = 56, kLatentMultiplyRegisters = 224;

template <bool kIsCluster>
__device__ __forceinline__ void synchronize_blocks() {
  if constexpr (kIsCluster) {
    ptx::barrier_cluster_arrive();
    ptx::barrier_cluster_wait();
  } else {
    __syncthreads();
  }
}

// Calls take() for each piece of the block's workers of which it has rows, as for_each_piece does; latent_share blocks
// that follow one another have the same workers, each with its 64 rows of the tile. The blocks of a cluster take every
// piece, with rows or without, since each copies for both.
template <Tile kTile, bool kIsCluster, class Take>
__device__ __forceinline__ void for_each_latent_piece(const WorkArguments& work, const LatentRoom& room,
                                                      const Take& take) {
  constexpr int kShare = latent_share(kTile);
  LatentPiece& piece = room.piece();
  const bool writes = threadIdx.x % 32 == 0;
  if (writes) {
    piece.next_unit = 0;
    piece.next_worker = blockIdx.x / kShare;
  }
#pragma unroll 1
  while (true) {
    __syncwarp();
    const int64_t* plan = work.plan != nullptr ? work.plan : room.shared().plan;
    const Workers workers(work, plan);
    const int64_t worker = piece.next_worker;
    if (worker >= workers.count) break;
    const int64_t begin = workers.begin(worker), end = workers.begin(worker + 1),
                  unit = piece.next_unit > begin ? piece.next_unit : begin;
    const Segment segment = segment_of<kTile>(work, plan, unit);
    const int64_t after = segment.first_unit + segment.units, last = after < end ? after : end;
    const bool is_whole = unit == segment.first_unit && last == after;
    const int32_t first_row = segment.row_tile * tile_rows(kTile) + blockIdx.x % kShare * kLatentRows;
    const int32_t last_row = segment.request.queries * static_cast<int32_t>(work.attend.group_divider.divisor) - 1;
    __syncwarp();
    if (writes) {
      piece.next_unit = last;
      if (last == end) piece.next_worker += gridDim.x / kShare;
      piece.result =
          is_whole ? nullptr : piece_at<kTile>(work, place_of_piece(work, workers, worker, segment.first_unit));
      piece.request = segment.request;
      piece.first_row = first_row;
      piece.last_row = last_row;
      piece.steps = steps_of<kTile>(work, segment, static_cast<int32_t>(unit - segment.first_unit),
                                    static_cast<int32_t>(last - segment.first_unit));
    }
    __syncwarp();
    if (kIsCluster || first_row <= last_row) take();
  }
}

template <class Element, Tile kTile, bool kBoxes>
__global__ void __launch_bounds__(kLatentThreads, 1)
    attend_latent_sm90(const __grid_constant__ LatentArguments arguments) {
  static_assert(kTile.size == 576 && kTile.value_size == 512 && kTile.keys == 2 * kLatentKeys && kTile.bytes == 2);
  constexpr bool kIsCluster = kBoxes && latent_share(kTile) > 1;
  extern __shared__ __align__(1024) unsigned char memory[];
  const WorkArguments& work = arguments.work;
  const LatentRoom room{memory};
  LatentShared& shared = room.shared();
  if (threadIdx.x == 0) {
    for (int i = 0; i < kLatentParts; ++i) {
      // What every warp writes, and without boxes every lane's copies.
      shared.full[i].init(kBoxes ? kLatentCopyWarps : 33 * kLatentCopyWarps);
      // The warps of the warpgroup that is done last, of all blocks that this one's copies reach.
      shared.empty[i].init(kIsCluster ? 4 * latent_share(kTile) : 4);
    }
  }
  tile::wait_for_earlier_kernels();
  tile::let_next_kernel_start();
  plan_of<kTile>(work, shared.plan);
  synchronize_blocks<kIsCluster>();
  const int32_t warpgroup = __shfl_sync(0xffffffffu, static_cast<int32_t>(threadIdx.x / 128), 0);
  if (warpgroup == 2) {
    ptx::setmaxnreg_dec<kLatentCopyRegisters>();
    LatentCopier<kTile, kBoxes> copier(arguments, room);
    for_each_latent_piece<kTile, kIsCluster>(
        work, room, [&]() __attribute__((always_inline)) { copier.copy(); });
  } else {
    ptx::setmaxnreg_inc<kLatentMultiplyRegisters>();
    if (warpgroup == 0) {
      LatentConsumer<Element, kTile, kBoxes, 0> consumer(work, room);
      for_each_latent_piece<kTile, kIsCluster>(
          work, room, [&]() __attribute__((always_inline)) { consumer.attend(); });
    } else {
      LatentConsumer<Element, kTile, kBoxes, 1> consumer(work, room);
      for_each_latent_piece<kTile, kIsCluster>(
          work, room, [&]() __attribute__((always_inline)) { consumer.attend(); });
    }
  }
  // A block must not end while the other may still write into its memory or arrive at its barriers.
  if constexpr (kIsCluster) synchronize_blocks<true>();
}

}  // namespace kernel_pytorch::paged_attention
