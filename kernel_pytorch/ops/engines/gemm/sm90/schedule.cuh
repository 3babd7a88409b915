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
  int32_t matrix = 0;          // of b and of the bias, in groups
  int32_t begin = 0, end = 0;  // of the group
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
    constexpr int kParts = sm90_parts(kConfig), kAcross = sm90_across(kConfig), kDown = sm90_down(kConfig);
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

// Offsets and gathers may be an earlier kernel's of the same programmatic launch: never by the read-only path.
__device__ __forceinline__ int32_t group_end(const Sm90Groups& groups, int32_t group) {
  return min(max(groups.ends[group], 0), groups.rows);
}

// Groups of rows: their tiles are counted one after another, no tile has rows of two. The groups are walked as the
// index grows, so that nobody has to know their number of tiles beforehand.
template <Sm90Config kConfig>
class Sm90RowGroupWalk {
  static_assert(kConfig.cluster == 1);

 public:
  explicit __device__ __forceinline__ Sm90RowGroupWalk(const Sm90Arguments& arguments)
      : order_(arguments.order),
        groups_(arguments.groups),
        k_stages_(arguments.k_stages),
        index_(static_cast<int32_t>(blockIdx.x)) {
    seek();
  }
  __device__ __forceinline__ bool has_tile() const { return group_ < groups_.count; }
  __device__ __forceinline__ void advance() {
    index_ += static_cast<int32_t>(gridDim.x);
    seek();
  }
  __device__ __forceinline__ Sm90Place place() const {
    const int32_t index = index_ - first_;
    // Bands of about order_.group, as high as each other: a low one would read all of b for few rows.
    const int32_t bands = max((tiles_m_ + order_.group / 2) / order_.group, 1), whole = (tiles_m_ + bands - 1) / bands;
    const int32_t of_band = whole * order_.tiles_n;
    const int32_t band = index / of_band, rest = index - band * of_band;
    const int32_t top = band * whole, height = min(tiles_m_ - top, whole);
    const int32_t n = rest / height, m = top + rest - n * height;
    return {.row = begin_ + m * kConfig.tile_m,
            .column = n * kConfig.tile_n,
            .batch = 0,
            .first_stage = 0,
            .stages = k_stages_,
            .matrix = group_,
            .begin = begin_,
            .end = end_};
  }

 private:
  __device__ __forceinline__ void seek() {
    while (group_ < groups_.count && index_ >= first_ + tiles_m_ * order_.tiles_n) {
      first_ += tiles_m_ * order_.tiles_n;
      begin_ = end_;
      if (++group_ < groups_.count) end_ = max(group_end(groups_, group_), begin_);
      tiles_m_ = (end_ - begin_ + kConfig.tile_m - 1) / kConfig.tile_m;
    }
  }

  const Sm90Order& order_;
  const Sm90Groups& groups_;
  int32_t k_stages_;
  int32_t index_;
  int32_t group_ = -1, first_ = 0, tiles_m_ = 0;
  int32_t begin_ = 0, end_ = 0;
};

// Groups of steps of k: each is a batch, with as many stages as it has steps for, at least one.
template <Sm90Config kConfig>
class Sm90DepthGroupWalk {
  static_assert(!kConfig.splits);

 public:
  explicit __device__ __forceinline__ Sm90DepthGroupWalk(const Sm90Arguments& arguments)
      : walk_(arguments), groups_(arguments.groups) {}
  __device__ __forceinline__ bool has_tile() const { return walk_.has_tile(); }
  __device__ __forceinline__ void advance() { walk_.advance(); }
  __device__ __forceinline__ Sm90Place place() const {
    Sm90Place place = walk_.place();
    place.begin = place.batch == 0 ? 0 : group_end(groups_, place.batch - 1);
    place.end = max(group_end(groups_, place.batch), place.begin);
    constexpr int kStage = kSm90StageBytes / 2;
    place.stages = max((place.end - place.begin + kStage - 1) / kStage, 1);
    return place;
  }

 private:
  Sm90Walk<kConfig> walk_;
  const Sm90Groups& groups_;
};

template <Sm90Config kConfig, Sm90Grouping kGrouping>
struct Sm90WalkOf {
  using Type = Sm90Walk<kConfig>;
};
template <Sm90Config kConfig>
struct Sm90WalkOf<kConfig, Sm90Grouping::kRows> {
  using Type = Sm90RowGroupWalk<kConfig>;
};
template <Sm90Config kConfig>
struct Sm90WalkOf<kConfig, Sm90Grouping::kDepth> {
  using Type = Sm90DepthGroupWalk<kConfig>;
};

}  // namespace kernel_pytorch::product
