// How the keys of all requests are shared out among workers (arguments_cuda.h): the plan, and what follows from it.
#pragma once

#include "kernel_pytorch/ops/paged_attention/cuda/request.cuh"

namespace kernel_pytorch::paged_attention {

// The units of a request: row tiles, key heads, and units of keys of each.
struct Units {
  int32_t row_tiles, keys;  // keys: units of one segment, at least 1

  __device__ __forceinline__ int64_t all(int32_t head_groups) const {
    return static_cast<int64_t>(row_tiles) * head_groups * keys;
  }
};
template <Tile kTile>
__device__ __forceinline__ int32_t head_groups(const WorkArguments& work) {
  return work.attend.key_heads / kTile.heads;
}
template <Tile kTile>
__device__ __forceinline__ Units units_of(const WorkArguments& work, const Request& request) {
  const AttendArguments& arguments = work.attend;
  const int32_t group = arguments.heads / arguments.key_heads;
  const int32_t row_tiles = (request.queries * group + tile_rows(kTile) - 1) / tile_rows(kTile);
  // No tile of rows sees more keys than this: windows of its first and last query, and a step for the cut at either
  // end.
  const int32_t queries = (tile_rows(kTile) - 1) / group + 1;
  int64_t keys = request.keys;
  const int64_t right = arguments.causal ? 0 : arguments.window_right;
  const int64_t seen = static_cast<int64_t>(arguments.window_left) + right + queries + 1;
  if (seen + kTile.keys < keys) keys = seen + kTile.keys;
  const int32_t step = kTile.keys * work.unit_tiles;
  return {row_tiles, max(1, static_cast<int32_t>((keys + step - 1) / step))};
}

// The running numbers of units, by one block of whole warps; all of its threads know them when this returns.
template <Tile kTile>
__device__ __forceinline__ void plan_in_block(const WorkArguments& work, int64_t* plan) {
  __shared__ int64_t totals[32];
  __shared__ int64_t before;
  const int32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32, threads = static_cast<int32_t>(blockDim.x);
  if (threadIdx.x == 0) {
    before = 0;
    plan[0] = 0;
  }
  __syncthreads();
  for (int32_t first = 0; first < work.attend.requests; first += threads) {
    const int32_t index = first + static_cast<int32_t>(threadIdx.x);
    int64_t sum = 0;
    if (index < work.attend.requests) {
      sum = units_of<kTile>(work, request_at(work.attend, index)).all(head_groups<kTile>(work));
    }
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2) {
      const int64_t other = __shfl_up_sync(0xffffffffu, sum, distance);
      if (lane >= distance) sum += other;
    }
    if (lane == 31) totals[warp] = sum;
    __syncthreads();
    int64_t start = before;
    for (int i = 0; i < warp; ++i) start += totals[i];
    if (index < work.attend.requests) plan[index + 1] = start + sum;
    __syncthreads();
    if (static_cast<int32_t>(threadIdx.x) == threads - 1) before = start + sum;
    __syncthreads();
  }
}
// The plan of a call: the one that was made before, or the block's own.
template <Tile kTile>
__device__ __forceinline__ const int64_t* plan_of(const WorkArguments& work, int64_t* own) {
  if (work.plan != nullptr) return work.plan;
  plan_in_block<kTile>(work, own);
  return own;
}

template <Tile kTile>
__global__ void __launch_bounds__(1024) plan(const __grid_constant__ WorkArguments work) {
  plan_in_block<kTile>(work, work.plan);
}

// Where units stand.
struct Segment {
  Request request;
  int32_t row_tile, head_group;
  int64_t first_unit;
  int32_t units;
};
template <Tile kTile>
__device__ __forceinline__ Segment segment_of(const WorkArguments& work, const int64_t* plan, int64_t unit) {
  int32_t first = 0, last = work.attend.requests;
  while (last - first > 1) {
    const int32_t middle = (first + last) / 2;
    if (plan[middle] <= unit) {
      first = middle;
    } else {
      last = middle;
    }
  }
  Segment segment;
  segment.request = request_at(work.attend, first);
  const Units units = units_of<kTile>(work, segment.request);
  const int32_t inside = static_cast<int32_t>((unit - plan[first]) / units.keys);
  segment.row_tile = inside / head_groups<kTile>(work);
  segment.head_group = inside % head_groups<kTile>(work);
  segment.first_unit = plan[first] + static_cast<int64_t>(inside) * units.keys;
  segment.units = units.keys;
  return segment;
}

// The one that follows, in this request or the next that has rows.
template <Tile kTile>
__device__ __forceinline__ void next_segment(const WorkArguments& work, Segment& segment) {
  segment.first_unit += segment.units;
  if (++segment.head_group < head_groups<kTile>(work)) return;
  segment.head_group = 0;
  const int32_t group = static_cast<int32_t>(work.attend.group_divider.divisor);
  if (++segment.row_tile * tile_rows(kTile) < segment.request.queries * group) return;
  segment.row_tile = 0;
  do {
    segment.request = request_at(work.attend, segment.request.index + 1);
  } while (segment.request.queries == 0);
  segment.units = units_of<kTile>(work, segment.request).keys;
}

struct Workers {
  int64_t units, count;

  __device__ __forceinline__ Workers(const WorkArguments& work, const int64_t* plan)
      : units(plan[work.attend.requests]), count(work.workers > 0 && work.workers < units ? work.workers : units) {}
  __device__ __forceinline__ int64_t begin(int64_t worker) const { return worker * units / count; }
  __device__ __forceinline__ int64_t of(int64_t unit) const { return ((unit + 1) * count - 1) / units; }
};
// A worker keeps at most two pieces: one that it goes on with and one that it begins.
__device__ __forceinline__ int64_t place_of_piece(const WorkArguments& work, const Workers& workers, int64_t worker,
                                                  int64_t first_unit) {
  if (work.workers == 0) return worker;
  return 2 * worker + (workers.begin(worker) < first_unit ? 1 : 0);
}

template <Tile kTile>
__device__ __forceinline__ float* piece_at(const WorkArguments& work, int64_t place) {
  return work.partial + place * (kTile.heads * tile_rows(kTile) * (kTile.value_size + 2));
}

}  // namespace kernel_pytorch::paged_attention
