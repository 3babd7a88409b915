// What segment ids leave of each tile's walk, found once for all heads before the kernels that walk: by a warp for each
// tile of queries (or of keys) of a batch.
#pragma once

#include "kernel_pytorch/cuda/tile/dependent_launch.cuh"
#include "kernel_pytorch/ops/attention/cuda/walk.cuh"

namespace kernel_pytorch::attention {

inline constexpr int kSegmentPlanThreads = 128;

// The tiles with one id that a walk over keys meets first, from its end on, or a walk over queries, from its beginning:
// as many as follow without a gap. `place` counts along the walk.
template <class HasOneId>
__device__ __forceinline__ void find_run(int32_t count, int32_t& begin, int32_t& end, const HasOneId& has_one_id) {
  const int32_t lane = static_cast<int32_t>(threadIdx.x % 32);
  bool has_begun = false;
  begin = end = count;
  for (int32_t done = 0; done < count; done += 32) {
    const uint32_t ones = __ballot_sync(0xffffffffu, done + lane < count && has_one_id(done + lane));
    uint32_t rest = ones;
    if (!has_begun) {
      if (ones == 0) continue;
      begin = done + __ffs(static_cast<int>(ones)) - 1;
      has_begun = true;
      rest |= (1u << begin % 32) - 1u;
    }
    if (rest == 0xffffffffu) continue;
    end = done + __ffs(static_cast<int>(~rest)) - 1;
    return;
  }
}

template <Features kFeatures, bool kOverKeys, int kRows, int kColumns>
__global__ void __launch_bounds__(kSegmentPlanThreads)
    plan_segments(const __grid_constant__ ScoreArguments arguments, WalkSpan* spans) {
  tile::let_next_kernel_start();
  tile::wait_for_earlier_kernels();
  const int32_t rows = kOverKeys ? arguments.queries : arguments.keys, tiles = (rows + kRows - 1) / kRows;
  const int32_t index = static_cast<int32_t>((blockIdx.x * kSegmentPlanThreads + threadIdx.x) / 32);
  const int32_t batch = index / tiles, first = index % tiles * kRows;
  if (batch >= arguments.batches) return;
  const Head head = load_head<kFeatures>(arguments, batch, 0);
  WalkSpan span{};
  if (first < (kOverKeys ? head.queries : head.keys)) {
    const Walk<kFeatures, kOverKeys, kRows, kColumns> walk(arguments, head, first);
    span = walk.span();
    const int32_t count = walk.count(), last = span.last_tile - 1;
    int32_t begin, end;
    find_run(count, begin, end, [&](int32_t place) {
      return walk.has_one_id((kOverKeys ? last - place : span.first_tile + place) * kColumns);
    });
    span.one_first = kOverKeys ? last + 1 - end : span.first_tile + begin;
    span.one_last = kOverKeys ? last + 1 - begin : span.first_tile + end;
  }
  if (threadIdx.x % 32 == 0) spans[index] = span;
}

}  // namespace kernel_pytorch::attention
