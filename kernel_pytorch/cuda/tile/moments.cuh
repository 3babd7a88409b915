// Mean and squared deviations of values that lie over the warps of a block or a cluster, with one exchange instead of
// two. A warp sums differences from a pivot, which is one of its values; parts are then merged (Chan,
// Golub, LeVeque): squares = sum of part squares + count * (part mean - mean)^2. No difference of large squares, unless
// the pivot is far from most values, and no rounding at all where all values are equal: pivot and part means are that
// value, and every difference is 0.
#pragma once

#include "kernel_pytorch/cuda/tile/reduce.cuh"

namespace kernel_pytorch::tile {

struct Moments {
  float mean;
  float squares;  // sum of squared deviations from the mean
};

// Sums of differences from a pivot and of their squares.
struct PivotSums {
  float sum;
  float squares;
};

// Over groups of kLanes neighbouring lanes, the pivot being that of a group's first lane.
template <int kLanes, class Pivot, class SumsAround>
__device__ __forceinline__ Moments moments_of_lanes(float inverse_count, Pivot pivot_of, SumsAround sums_around) {
  constexpr float kLargest = 3.402823466e38f;
  const float pivot = __shfl_sync(0xffffffffu, pivot_of(), 0, kLanes);
  const PivotSums own = sums_around(pivot);
  const float sum = sum_lanes<kLanes>(own.sum), squares = sum_lanes<kLanes>(own.squares);
  const float distance = sum * inverse_count;
  // Infinite squares stay infinite, and a NaN stays one, which fmaxf would not do.
  const float around_mean = squares - fminf(sum * distance, kLargest);
  return {pivot + distance, around_mean < 0 ? 0.0f : around_mean};
}

// What a part of `count` values adds to the squares around the mean of all.
__device__ __forceinline__ float merged_squares(Moments part, float count, float mean) {
  const float distance = part.mean - mean;
  return part.squares + count * distance * distance;
}

template <int kWarps, int kGroups = 1>
class BlockMoments {
  using Group = WarpGroup<kWarps, kGroups>;

 public:
  static constexpr int kParts = kWarps;
  struct Storage {
    alignas(16) Moments groups[kGroups][2][kWarps];
  };
  // count_of(block, warp): values of a part.
  template <class CountOf>
  __device__ __forceinline__ BlockMoments(Storage& storage, CountOf count_of)
      : storage_(storage), count_(count_of(0, threadIdx.x % kWarpLanes % kWarps)) {}

  // One barrier of the group. `part` is the warp's, the same in all its lanes; inverse_count is one over all values.
  __device__ __forceinline__ Moments merge(Moments part, float inverse_count) {
    const int lane = threadIdx.x % kWarpLanes;
    Moments(&parts)[kWarps] = storage_.groups[Group::index()][buffer_];
    if (lane == 0) parts[Group::warp()] = part;
    Group::synchronise();
    buffer_ ^= 1;
    const Moments mine = parts[lane % kWarps];
    const float first = parts[0].mean;
    const float mean = first + sum_lanes<kWarps>(count_ * (mine.mean - first)) * inverse_count;
    return {mean, sum_lanes<kWarps>(merged_squares(mine, count_, mean))};
  }

 private:
  Storage& storage_;
  const float count_;  // of the part that this lane merges
  int buffer_ = 0;
};

template <int kWarps>
class ClusterMoments {
 public:
  static constexpr int kParts = kMaxClusterBlocks * kWarps;
  struct Storage {
    typename ClusterSum<kWarps, 2>::Storage exchange;
    float counts[kParts];  // by block, then warp
  };
  template <class CountOf>
  __device__ __forceinline__ ClusterMoments(Storage& storage, CountOf count_of)
      : storage_(storage), exchange_(storage.exchange) {
    for (int part = threadIdx.x; part < exchange_.parts(); part += kWarps * kWarpLanes) {
      storage.counts[part] = count_of(part / kWarps, part % kWarps);
    }
    __syncthreads();
  }

  __device__ __forceinline__ Moments merge(Moments part, float inverse_count) {
    const float values[2] = {part.mean, part.squares};
    const auto& received = exchange_.exchange(values);
    const int lane = threadIdx.x % kWarpLanes;
    const float first = received[0][0];
    float total = 0, squares = 0;
    for (int i = lane; i < exchange_.parts(); i += kWarpLanes) total += storage_.counts[i] * (received[i][0] - first);
    const float mean = first + sum_lanes<kWarpLanes>(total) * inverse_count;
    for (int i = lane; i < exchange_.parts(); i += kWarpLanes) {
      squares += merged_squares({received[i][0], received[i][1]}, storage_.counts[i], mean);
    }
    return {mean, sum_lanes<kWarpLanes>(squares)};
  }

 private:
  Storage& storage_;
  ClusterSum<kWarps, 2> exchange_;
};

}  // namespace kernel_pytorch::tile
