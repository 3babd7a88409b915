// Which tiles a block of the matrix product works on, and the ring that its warps meet at. Every block finds its tiles
// by itself, so producer and consumers need not talk about them. sm_90.
#pragma once

#include "kernel_pytorch/cuda/ptx/cluster.cuh"
#include "kernel_pytorch/cuda/tile/barrier.cuh"
#include "kernel_pytorch/ops/engines/gemm/sm90/tile_cuda.h"

namespace kernel_pytorch::product {

inline constexpr int kSm90MaximumStages = 16;

struct Sm90Shared {
  tile::Barrier full[kSm90MaximumStages], empty[kSm90MaximumStages];
  tile::Barrier parts[4];  // of each warp that the block finishes: the other parts' sums are here
};  // First row and column of the block's tile, and its stages along k: at least one, which may lie beyond the end of
    // k, where
// everything reads as zero.
struct Sm90Place {
  int32_t row, column, batch;
  int32_t first_stage, stages;
};

template <Sm90Config kConfig>
__device__ __forceinline__ int32_t block_rank() {
  return static_cast<int32_t>(blockIdx.x % kConfig.cluster);
}

template <Sm90Config kConfig>
class Sm90Walk {
 public:
  explicit __device__ __forceinline__ Sm90Walk(const Sm90Arguments& arguments)
      : order_(arguments.order),
        k_stages_(arguments.k_stages),
        index_(static_cast<int32_t>(blockIdx.x / kConfig.cluster)) {}
  __device__ __forceinline__ bool has_tile() const { return index_ < order_.total; }
  __device__ __forceinline__ void advance() { index_ += static_cast<int32_t>(gridDim.x / kConfig.cluster); }

  __device__ __forceinline__ Sm90Place place() const {
    const int32_t of_batch = order_.tiles_m * order_.tiles_n;
    const int32_t batch = index_ / of_batch, index = index_ - batch * of_batch;
    const int32_t of_group = order_.group * order_.tiles_n;
    const int32_t group = index / of_group, rest = index - group * of_group;
    const int32_t first = group * order_.group;
    const int32_t height = min(order_.tiles_m - first, order_.group);
    const int32_t n = rest / height, m = first + rest - n * height;
    constexpr int kSharing = sm90_sharing(kConfig), kParts = sm90_parts(kConfig);
    constexpr int kAcross = kConfig.share_a ? kSharing : 1, kDown = kConfig.share_a ? 1 : kSharing;
    const int32_t rank = block_rank<kConfig>();
    Sm90Place place = {.row = (m * kDown + (kDown > 1 ? rank : 0)) * kConfig.tile_m,
                       .column = (n * kAcross + (kAcross > 1 ? rank : 0)) * kConfig.tile_n,
                       .batch = batch,
                       .first_stage = 0,
                       .stages = k_stages_};
    if constexpr (kParts > 1) {
      const int32_t each = (k_stages_ + kParts - 1) / kParts;
      place.first_stage = rank * each;
      place.stages = max(min(each, k_stages_ - place.first_stage), 1);
    }
    return place;
  }

 private:
  const Sm90Order& order_;
  int32_t k_stages_;
  int32_t index_;
};

}  // namespace kernel_pytorch::product
