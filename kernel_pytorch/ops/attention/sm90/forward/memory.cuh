// What a consumer warp writes down about tiles in shared memory (Sm90Memory), since its registers are short: noted when
// a tile begins, read again by its steps, and kept until the tile after it has stored its rows.
#pragma once

#include "kernel_pytorch/cuda/tile/max_sum.cuh"
#include "kernel_pytorch/ops/attention/sm90/forward/schedule.cuh"

namespace kernel_pytorch::attention {

// In base 2; -inf for none.
template <Features kFeatures>
__device__ __forceinline__ float sink_of(const ScoreArguments& arguments, const Head& head) {
  if constexpr (!kFeatures.sinks) return tile::minus_infinity();
  return arguments.sinks[head.head * arguments.sinks_stride] * kLog2e;
}

template <Features kFeatures>
__device__ __forceinline__ void note(Sm90Memory& memory, const ScoreArguments& arguments, const Sm90Tile& tile,
                                     const Head& head, int32_t first_query) {
  __syncwarp();
  if (threadIdx.x % 32 == 0) {
    memory.tile = tile;
    memory.head = head;
    memory.first_query = first_query;
    if constexpr (kFeatures.sinks) memory.sink = sink_of<kFeatures>(arguments, head);
  }
  __syncwarp();
}

// Word by word: four at once would need four neighbouring registers.
template <Features kFeatures>
__device__ __forceinline__ Head recall_head(const Sm90Memory& memory, const ScoreArguments& arguments) {
  const volatile Head& noted = memory.head;
  Head head{noted.batch, noted.head, noted.queries, noted.keys, noted.left, noted.right, noted.offset, 0, 0, 0.0f};
  if constexpr (kFeatures.packed) {
    head.first_query = noted.first_query;
    head.first_key = noted.first_key;
  }
  if constexpr (kFeatures.alibi) head.slope = noted.slope;
  if constexpr (!kFeatures.packed && !kFeatures.key_lengths) head.keys = arguments.keys;
  return head;
}

// Only features that change scores need the head; the compiler would keep its loads even if nothing used them.
template <Features kFeatures>
__device__ __forceinline__ Head recall_head_for_scores(const Sm90Memory& memory, const ScoreArguments& arguments) {
  if constexpr (changes_scores(kFeatures) || kFeatures.dropout || kFeatures.packed || kFeatures.key_lengths) {
    return recall_head<kFeatures>(memory, arguments);
  }
  return {};
}

// The noted tile is now the one whose last product is not done yet.
template <Features kFeatures>
__device__ __forceinline__ void remember(Sm90Memory& memory) {
  __syncwarp();
  if (threadIdx.x % 32 == 0) {
    const Sm90Tile tile = memory.tile;
    memory.pending = tile;
    memory.pending_head = memory.head;
    if constexpr (kFeatures.sinks) memory.pending_sink = memory.sink;
    memory.pending_number = tile.has_work() ? memory.tiles_read : 0;
  }
  __syncwarp();
}

}  // namespace kernel_pytorch::attention
