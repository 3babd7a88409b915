// Packed sequences: the list of tiles that exist, longest first. Lengths are known on the device alone, so one block
// counts tiles by length, sums the counts up and writes each tile to its place. The order among equals is left to
// chance; results do not depend on it.
#pragma once

#include "kernel_pytorch/ops/attention/cuda/walk.cuh"
#include "kernel_pytorch/ops/attention/sm90/forward/tile_cuda.h"

namespace kernel_pytorch::attention {

inline constexpr int kPlanThreads = 1024;
inline constexpr int kPlanBuckets = 256;

// Calls use(bucket, sequence, tile) for every tile; a warp takes a sequence.
template <Features kFeatures, class Use>
__device__ __forceinline__ void for_each_packed_tile(const ScoreArguments& arguments, int32_t tile_queries,
                                                     const Use& use) {
  const int32_t warp = static_cast<int32_t>(threadIdx.x / 32), lane = static_cast<int32_t>(threadIdx.x % 32);
  for (int32_t sequence = warp; sequence < arguments.batches; sequence += kPlanThreads / 32) {
    const Head head = load_head<kFeatures>(arguments, sequence, 0);
    const int32_t tiles = (head.queries + tile_queries - 1) / tile_queries;
    for (int32_t tile = lane; tile < tiles; tile += 32) {
      const int32_t first = tile * tile_queries;
      const TileRange keys = keys_of_queries(kFeatures, head, first, least(first + tile_queries, head.queries));
      const int64_t length = greatest(0, keys.last - keys.first);
      const int32_t bucket = static_cast<int32_t>(length * (kPlanBuckets - 1) / greatest(1, arguments.keys));
      use(kPlanBuckets - 1 - least(bucket, kPlanBuckets - 1), sequence, tile);
    }
  }
}

template <Features kFeatures>
__global__ void __launch_bounds__(kPlanThreads, 1)
    sm90_plan_tiles(const __grid_constant__ ScoreArguments arguments, int32_t tile_queries, Sm90Plan* plan) {
  __shared__ int32_t places[kPlanBuckets];
  for (int i = static_cast<int>(threadIdx.x); i < kPlanBuckets; i += kPlanThreads) places[i] = 0;
  __syncthreads();
  for_each_packed_tile<kFeatures>(arguments, tile_queries,
                                  [&](int32_t bucket, int32_t, int32_t) { atomicAdd(&places[bucket], 1); });
  __syncthreads();
  if (threadIdx.x == 0) {
    int32_t total = 0;
    for (int i = 0; i < kPlanBuckets; ++i) {
      const int32_t count = places[i];
      places[i] = total;
      total += count;
    }
    plan->count = total;
  }
  __syncthreads();
  for_each_packed_tile<kFeatures>(arguments, tile_queries, [&](int32_t bucket, int32_t sequence, int32_t tile) {
    plan->tiles[atomicAdd(&places[bucket], 1)] = {sequence, tile};
  });
}

}  // namespace kernel_pytorch::attention
