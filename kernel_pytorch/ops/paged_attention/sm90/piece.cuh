// What the copying and the multiplying warps of a block agree on: shared memory, and the steps of a piece.
#pragma once

#include "kernel_pytorch/cuda/tile/barrier.cuh"
#include "kernel_pytorch/ops/paged_attention/cuda/work.cuh"

namespace kernel_pytorch::paged_attention {

template <Tile kTile>
struct Memory {
  char* shared;

  __device__ __forceinline__ tile::Barrier& full(int stage) const {
    return reinterpret_cast<tile::Barrier*>(shared)[stage];
  }
  __device__ __forceinline__ tile::Barrier& empty(int stage) const {
    return reinterpret_cast<tile::Barrier*>(shared)[kMostStages + stage];
  }
  __device__ __forceinline__ int64_t* plan() const { return reinterpret_cast<int64_t*>(shared + 2 * kMostStages * 8); }
  // Where rows of keys (0) and of values (1) begin, of one step: the copying warps' own.
  __device__ __forceinline__ int64_t* offsets(int which) const {
    return plan() + kSharedRequests + 8 + which * kTile.keys;
  }
  __device__ __forceinline__ char* stages() const { return reinterpret_cast<char*>(offsets(2)); }
  __device__ __forceinline__ char* stage(int index) const { return stages() + index * heads_stage_bytes(kTile); }
  __device__ __forceinline__ uint32_t rows(int index) const { return ptx::shared_address(stage(index)); }
  __device__ __forceinline__ float* scales(int index, int which) const {
    return reinterpret_cast<float*>(stage(index) + heads_rows_bytes(kTile) + which * heads_scale_bytes(kTile));
  }
  // Of each key, whether it is there.
  __device__ __forceinline__ bool* presence(int index) const {
    return reinterpret_cast<bool*>(stage(index) + heads_rows_bytes(kTile) + 2 * heads_scale_bytes(kTile));
  }
};

__device__ __forceinline__ bool has_token_scales(const CacheArguments& cache) {
  return cache.scales != nullptr && (cache.scale_row_stride != 0 || cache.scale_page_stride != 0);
}

// The steps of a piece: those of its units that some row of the tile sees. No step between all_first and all_last has
// to look at bounds.
struct Steps {
  int32_t first, last, all_first, all_last;
};
template <Tile kTile>
__device__ __forceinline__ Steps steps_of(const WorkArguments& work, const Segment& segment, int32_t first_unit,
                                          int32_t last_unit) {
  const AttendArguments& arguments = work.attend;
  const int32_t group = static_cast<int32_t>(arguments.group_divider.divisor);
  const int32_t first_row = segment.row_tile * tile_rows(kTile);
  const int32_t last_row = min(first_row + tile_rows(kTile), segment.request.queries * group) - 1;
  const auto seen = [&](int32_t row) {
    const int32_t query = static_cast<int32_t>(divide(static_cast<uint32_t>(row), arguments.group_divider));
    return keys_seen(arguments, segment.request, segment.request.position(query));
  };
  const KeyRange oldest = seen(first_row), newest = seen(last_row);
  const int32_t start = oldest.first / kTile.keys, end = (max(oldest.last, newest.last) + kTile.keys - 1) / kTile.keys;
  return {min(end, start + first_unit * work.unit_tiles), min(end, start + last_unit * work.unit_tiles), newest.first,
          min(oldest.last, newest.last)};
}

// Calls take(segment, steps, piece) for each piece of the block's workers; a whole segment has no piece.
template <Tile kTile, class Take>
__device__ __forceinline__ void for_each_piece(const WorkArguments& work, const int64_t* plan, const Take& take) {
  const Workers workers(work, plan);
  for (int64_t worker = blockIdx.x; worker < workers.count; worker += gridDim.x) {
    const int64_t end = workers.begin(worker + 1);
    Segment segment = segment_of<kTile>(work, plan, workers.begin(worker));
    for (int64_t unit = workers.begin(worker); unit < end;) {
      const int64_t after = segment.first_unit + segment.units, last = after < end ? after : end;
      const bool is_whole = unit == segment.first_unit && last == after;
      take(segment,
           steps_of<kTile>(work, segment, static_cast<int32_t>(unit - segment.first_unit),
                           static_cast<int32_t>(last - segment.first_unit)),
           is_whole ? nullptr : piece_at<kTile>(work, place_of_piece(work, workers, worker, segment.first_unit)));
      unit = last;
      if (unit < end) next_segment<kTile>(work, segment);
    }
  }
}

}  // namespace kernel_pytorch::paged_attention
