// Which tiles a block of threads works on. The producer warp takes the next tile from a counter in global memory and
// tells the consumers through two slots in shared memory, so that their pipeline never empties between tiles. Tiles
// that left the range of floats (attention_sm90_softmax_cuda.cuh) come back at the end, to be done the careful way.
#pragma once

#include "kernel_pytorch/cuda/tile/barrier.cuh"
#include "kernel_pytorch/ops/attention/attention_sm90_cuda.h"

namespace kernel_pytorch::attention {

enum class TileKind : int32_t { kWork, kRedo, kDrain, kEnd };

struct alignas(16) Sm90Tile {
  int32_t batch, head, query_tile;
  TileKind kind;

  __device__ __forceinline__ bool has_work() const { return kind == TileKind::kWork || kind == TileKind::kRedo; }
};

inline constexpr int kSm90MaximumStages = 4;
inline constexpr int kSm90TileSlots = 2;
inline constexpr int kSm90MaximumWarps = 12;
inline constexpr int32_t kNoTile = -1;

// What a consumer warp knows about tiles: in shared memory, since its registers are short.
struct Sm90Memory {
  Sm90Tile pending;        // its last product is not done yet
  int32_t pending_number;  // its place among the block's tiles; 0: nothing is pending
  int32_t tiles_read;
  uint32_t query_parity;  // of the buffer of queries, where they are held in registers
};

struct Sm90Shared {
  tile::Barrier query_full[2], query_empty[2];
  tile::Barrier key_full[kSm90MaximumStages], key_empty[kSm90MaximumStages];
  tile::Barrier value_full[kSm90MaximumStages], value_empty[kSm90MaximumStages];
  tile::Barrier tile_full[kSm90TileSlots], tile_empty[kSm90TileSlots];
  tile::Barrier drained;
  Sm90Tile tiles[kSm90TileSlots];
  Sm90Memory memories[kSm90MaximumWarps];
  int32_t redo_first;     // of the list that redo_links continues: batch_head * query tiles + query tile
  int32_t redo_asked[2];  // the latest tile, by its number in this block, that was put on it
  float pin;              // see ptx::st_shared_f32_if_negative
};
static_assert(sizeof(Sm90Shared) <= kSm90BarrierBytes);

// One for each launch in flight; a launch leaves its own at zero.
__device__ uint32_t sm90_tile_counters[kSm90Counters];

__device__ __forceinline__ Sm90Tile make_tile(const Sm90ForwardArguments& arguments, int32_t batch_head,
                                              int32_t query_tile, TileKind kind) {
  const int32_t batch = batch_head / arguments.score.heads;
  return {batch, batch_head - batch * arguments.score.heads, query_tile, kind};
}

template <Features kFeatures>
__device__ __forceinline__ int32_t tile_count(const Sm90ForwardArguments& arguments) {
  return kFeatures.packed ? arguments.plan->count * arguments.score.heads : arguments.order.total;
}

template <Features kFeatures>
__device__ __forceinline__ Sm90Tile tile_at(const Sm90ForwardArguments& arguments, int32_t index, TileKind kind) {
  const Sm90Order& order = arguments.order;
  if constexpr (kFeatures.packed) {
    const int32_t place = index / arguments.score.heads;
    const Sm90PlannedTile planned = arguments.plan->tiles[place];
    return {planned.sequence, index - place * arguments.score.heads, planned.query_tile, kind};
  }
  const int32_t section_tiles = order.section_heads * order.query_tiles;
  const int32_t section = index / section_tiles, place = index - section * section_tiles;
  const int32_t first_head = section * order.section_heads;
  if (!order.longest_first) {
    return make_tile(arguments, first_head + place / order.query_tiles, place % order.query_tiles, kind);
  }
  const int32_t heads = least(order.section_heads, order.heads - first_head);
  return make_tile(arguments, first_head + place % heads, order.query_tiles - 1 - place / heads, kind);
}

// Exactly `total` calls are made by a launch, and the last of them puts the counter back.
__device__ __forceinline__ int32_t take_tile(const Sm90ForwardArguments& arguments, int32_t total) {
  uint32_t* counter = sm90_tile_counters + arguments.counter_index;
  const uint32_t before = atomicAdd(counter, 1u);
  if (before == static_cast<uint32_t>(total) - 1) *counter = 0;
  return static_cast<int32_t>(before + gridDim.x);
}

// Puts a tile on the list of those to be done again, once however many warps ask. `number` counts the block's tiles;
// warps are never two tiles apart.
__device__ __forceinline__ void ask_for_redo(Sm90Shared& shared, const Sm90ForwardArguments& arguments,
                                             const Sm90Tile& tile, int32_t number) {
  if (atomicMax(&shared.redo_asked[number % 2], number) >= number) return;
  const int32_t place =
      (tile.batch * arguments.score.heads + tile.head) * arguments.order.query_tiles + tile.query_tile;
  arguments.redo_links[place] = atomicExch(&shared.redo_first, place);
}
__device__ __forceinline__ Sm90Tile redo_tile(const Sm90ForwardArguments& arguments, int32_t place) {
  const int32_t batch_head = place / arguments.order.query_tiles;
  return make_tile(arguments, batch_head, place - batch_head * arguments.order.query_tiles, TileKind::kRedo);
}

// A consumer warp's next tile.
__device__ __forceinline__ Sm90Tile read_tile(Sm90Shared& shared, int32_t warp) {
  const int32_t number = shared.memories[warp].tiles_read, slot = number % kSm90TileSlots;
  shared.tile_full[slot].wait(number / kSm90TileSlots % 2);
  Sm90Tile tile = shared.tiles[slot];
  // The same in all lanes, and known to be so.
  tile.batch = __shfl_sync(0xffffffffu, tile.batch, 0);
  tile.head = __shfl_sync(0xffffffffu, tile.head, 0);
  tile.query_tile = __shfl_sync(0xffffffffu, tile.query_tile, 0);
  tile.kind = static_cast<TileKind>(__shfl_sync(0xffffffffu, static_cast<int32_t>(tile.kind), 0));
  if (threadIdx.x % 32 == 0) {
    shared.tile_empty[slot].arrive();
    shared.memories[warp].tiles_read = number + 1;
  }
  __syncwarp();
  return tile;
}

// The producer's side, by one thread.
class TileWriter {
 public:
  __device__ __forceinline__ explicit TileWriter(Sm90Shared& shared) : shared_(shared) {}
  __device__ __forceinline__ void publish(const Sm90Tile& tile) {
    shared_.tile_empty[state_.stage].wait(state_.parity ^ 1);
    shared_.tiles[state_.stage] = tile;
    shared_.tile_full[state_.stage].arrive();
    state_.advance(kSm90TileSlots);
  }

 private:
  Sm90Shared& shared_;
  tile::PipelineState state_;
};

}  // namespace kernel_pytorch::attention
