// Attention over latent rows (MLA) on Hopper, by wgmma: a warpgroup copies keys, two multiply (consumer.cuh). A key is
// its latent row (512 columns) followed by its rope row (64); the latent row is the value too, and read once.
#pragma once

#include "kernel_pytorch/cuda/tile/dependent_launch.cuh"
#include "kernel_pytorch/ops/paged_attention/latent/sm90/consumer.cuh"
#include "kernel_pytorch/ops/paged_attention/latent/sm90/copy.cuh"

namespace kernel_pytorch::paged_attention {

inline constexpr int kLatentCopyRegisters = 56, kLatentMultiplyRegisters = 224;

// Pieces of which this block has rows.
template <Tile kTile, class Take>
__device__ __forceinline__ void for_each_latent_piece(const WorkArguments& work, const int64_t* plan,
                                                      const Take& take) {
  for_each_piece<kTile, latent_share(kTile)>(work, plan, [&](const Segment& segment, const Steps& steps, float* piece) {
    if (first_latent_row<kTile>(segment) < latent_row_count(work.attend, segment)) take(segment, steps, piece);
  });
}

template <class Element, Tile kTile>
__global__ void __launch_bounds__(kLatentThreads, 1)
    attend_latent_sm90(const __grid_constant__ WorkArguments work) {
  static_assert(kTile.size == 576 && kTile.value_size == 512 && kTile.keys == 2 * kLatentKeys && kTile.bytes == 2);
  extern __shared__ __align__(1024) unsigned char memory[];
  const LatentRoom room{memory};
  LatentShared& shared = room.shared();
  if (threadIdx.x == 0) {
    for (int i = 0; i < kLatentParts; ++i) {
      shared.full[i].init(33 * kLatentCopyWarps);  // what every warp writes, and every lane's copies
      shared.empty[i].init(4);                     // the warps of the warpgroup that is done last
    }
  }
  tile::wait_for_earlier_kernels();
  tile::let_next_kernel_start();
  const int64_t* plan = plan_of<kTile>(work, shared.plan);
  __syncthreads();
  const int32_t warpgroup = __shfl_sync(0xffffffffu, static_cast<int32_t>(threadIdx.x / 128), 0);
  if (warpgroup == 2) {
    ptx::setmaxnreg_dec<kLatentCopyRegisters>();
    LatentCopier<kTile> copier(work, room);
    for_each_latent_piece<kTile>(
        work, plan, [&](const Segment& segment, const Steps& steps, float*) { copier.copy(segment, steps); });
  } else {
    ptx::setmaxnreg_inc<kLatentMultiplyRegisters>();
    if (warpgroup == 0) {
      LatentConsumer<Element, kTile, 0> consumer(work, room);
      for_each_latent_piece<kTile>(work, plan, [&](const Segment& segment, const Steps& steps, float* piece) {
        consumer.attend(segment, steps, piece);
      });
    } else {
      LatentConsumer<Element, kTile, 1> consumer(work, room);
      for_each_latent_piece<kTile>(work, plan, [&](const Segment& segment, const Steps& steps, float* piece) {
        consumer.attend(segment, steps, piece);
      });
    }
  }
}

}  // namespace kernel_pytorch::paged_attention
