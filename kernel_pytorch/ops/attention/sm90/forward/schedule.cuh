// Which tiles a block of threads works on. The producer warp takes the next tile from a counter in global memory and
// tells the consumers through two slots in shared memory, so that their pipeline never empties between tiles. Tiles
// that left the range of floats (attention/sm90/forward/softmax.cuh) come back at the end, to be done the careful way.
#pragma once

#include "kernel_pytorch/cuda/tile/barrier.cuh"
#include "kernel_pytorch/ops/attention/cuda/walk.cuh"
#include "kernel_pytorch/ops/attention/sm90/forward/tile_cuda.h"

namespace kernel_pytorch::attention {

enum class TileKind : int32_t { kWork, kRedo, kEmpty, kDrain, kEnd };  // kEmpty: its queries see no key

// Which steps a tile has follows from bounds by arithmetic, which producer and consumers do alike; the producer hands
// on what was found ahead of segments. It reads the block lists and stores each step with its keys.
KP_SHARED_CODE constexpr bool reads_steps(Features features) {
  return features.blocks;
}
KP_SHARED_CODE constexpr bool has_spans(Features features) {
  return features.segments && !features.packed && !features.blocks;
}
struct Sm90Step {
  int32_t first;  // key
  uint32_t flags;
};
inline constexpr uint32_t kStepIsCareful = 1, kStepSkipsProgram = 2, kStepIsLast = 4;

// A row must have seen a key before a fast step: those to the right of what a tile's first query sees are careful.
__device__ __forceinline__ int32_t careful_above(Features features, const Head& head, int32_t first_query,
                                                 int32_t whole_last) {
  return features.right_bound ? least(whole_last, first_query + head.right) : whole_last;
}

template <Features kFeatures, int kKeys>
__device__ __forceinline__ uint32_t flags_of(const Step& step, const Head& head, int32_t first_query) {
  const bool is_right = step.first + kKeys > careful_above(kFeatures, head, first_query, head.keys);
  return (is_right || step.is_edge ? kStepIsCareful : 0) | (step.skips_program ? kStepSkipsProgram : 0);
}

// The steps of a tile by their first keys, from the last keys on: careful ones, then those that see every key they
// have, then those that need a mask but no running maximum, since by then every row has seen a key: windows' left edge,
// and of documents what is not known to be one.
struct Steps {
  int32_t first, last;
  int32_t careful_above;  // steps that reach beyond it are careful
  int32_t whole_last;     // steps from here on see every key they have
};
KP_SHARED_CODE constexpr bool masks_fast_steps(Features features) {
  return features.left_bound || features.segments;
}
template <Features kFeatures, int kQueries, int kKeys>
__device__ __forceinline__ Steps steps_of(const Head& head, int32_t first_query, const WalkSpan& span) {
  constexpr int32_t kNever = 0x7fffffff;
  const int32_t rows = least(kQueries, head.queries - first_query);
  const TileRange range = keys_of_queries(kFeatures, head, first_query, first_query + rows);
  Steps steps{(range.last - 1) / kKeys * kKeys, range.first / kKeys * kKeys, 0, 0};
  if constexpr (has_spans(kFeatures)) {
    steps.first = (span.last_tile - 1) * kKeys;
    steps.last = span.first_tile * kKeys;
  }
  steps.whole_last = steps.last;
  if constexpr (masks_every_tile(kFeatures)) return steps;
  steps.careful_above = careful_above(kFeatures, head, first_query, range.whole_last);
  if constexpr (kFeatures.left_bound) steps.whole_last = range.whole_first;
  if constexpr (kFeatures.segments) {
    const int32_t one_last = has_spans(kFeatures) ? span.one_last * kKeys : 0;
    const int32_t one_first = has_spans(kFeatures) ? span.one_first * kKeys : 0;
    // Without a diagonal, where each row sees itself, what comes before the tiles of one document is careful too.
    if constexpr (!kFeatures.right_bound) {
      steps.careful_above = one_first < one_last ? least(steps.careful_above, one_last) : 0;
    }
    const bool is_one = one_last >= least(steps.careful_above / kKeys * kKeys, steps.first);  // from the first fast one
    steps.whole_last = is_one ? greatest(steps.whole_last, one_first) : kNever;
  }
  return steps;
}

struct alignas(16) Sm90Tile {
  int32_t batch, head, query_tile;
  TileKind kind;

  __device__ __forceinline__ bool has_work() const { return kind == TileKind::kWork || kind == TileKind::kRedo; }
};

inline constexpr int kSm90MaximumStages = 4;
inline constexpr int kSm90TileSlots = 2;
inline constexpr int kSm90MaximumWarps = 12;
inline constexpr int kSm90RedoSlots = 4;
inline constexpr int32_t kNoTile = -1;

// What a consumer warp knows about tiles: in shared memory, since its registers are short.
struct Sm90Memory {
  // The tile whose steps run now, and its head.
  Sm90Tile tile;
  WalkSpan span;  // where has_spans
  Head head;
  int32_t first_query;
  float sink;  // of its head, in base 2, where there are sinks
  // The head of the tile whose last product is still in flight.
  Head pending_head;
  float pending_sink;
  Sm90Tile pending;
  int32_t pending_number;  // its place among the block's tiles; 0: nothing is pending
  bool pending_stores;     // its rows, where they are added to others: once, however often they are done

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
  WalkSpan spans[kSm90TileSlots];      // of the tiles, where has_spans
  Sm90Step steps[kSm90MaximumStages];  // of the keys of each stage, where reads_steps
  Sm90Memory memories[kSm90MaximumWarps];
  int32_t redo_first;                  // of the list that redo_links continues: batch_head * query tiles + query tile
  int32_t redo_asked[kSm90RedoSlots];  // the latest tile, by its number in this block, that was put on it
  float pin;                           // see ptx::st_shared_f32_if_negative
};
static_assert(sizeof(Sm90Shared) <= kSm90BarrierBytes);

// One for each launch in flight; a launch leaves its own at zero.
__device__ uint32_t sm90_tile_counters[kSm90Counters];

__device__ __forceinline__ Sm90Tile make_tile(const Sm90ForwardArguments& arguments, int32_t batch_head,
                                              int32_t query_tile, TileKind kind) {
  const int32_t batch = batch_head / arguments.score.heads;
  return {batch, batch_head - batch * arguments.score.heads, query_tile, kind};
}

__device__ __forceinline__ int32_t place_of_tile(const Sm90ForwardArguments& arguments, const Sm90Tile& tile) {
  return (tile.batch * arguments.score.heads + tile.head) * arguments.order.query_tiles + tile.query_tile;
}
__device__ __forceinline__ Sm90Tile tile_at_place(const Sm90ForwardArguments& arguments, int32_t place, TileKind kind) {
  const int32_t batch_head = place / arguments.order.query_tiles;
  return make_tile(arguments, batch_head, place - batch_head * arguments.order.query_tiles, kind);
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
  if constexpr (kFeatures.blocks) {
    if (arguments.places != nullptr) return tile_at_place(arguments, arguments.places[index], kind);
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
// warps are never four tiles apart.
__device__ __forceinline__ void ask_for_redo(Sm90Shared& shared, const Sm90ForwardArguments& arguments,
                                             const Sm90Tile& tile, int32_t number) {
  if (atomicMax(&shared.redo_asked[number % kSm90RedoSlots], number) >= number) return;
  const int32_t place = place_of_tile(arguments, tile);
  arguments.redo_links[place] = atomicExch(&shared.redo_first, place);
}

// A consumer warp's next tile; its span goes to the warp's memory.
template <Features kFeatures>
__device__ __forceinline__ Sm90Tile read_tile(Sm90Shared& shared, int32_t warp) {
  const int32_t number = shared.memories[warp].tiles_read, slot = number % kSm90TileSlots;
  shared.tile_full[slot].wait(number / kSm90TileSlots % 2);
  Sm90Tile tile = shared.tiles[slot];
  // The same in all lanes, and known to be so.
  tile.batch = __shfl_sync(0xffffffffu, tile.batch, 0);
  tile.head = __shfl_sync(0xffffffffu, tile.head, 0);
  tile.query_tile = __shfl_sync(0xffffffffu, tile.query_tile, 0);
  tile.kind = static_cast<TileKind>(__shfl_sync(0xffffffffu, static_cast<int32_t>(tile.kind), 0));
  if constexpr (has_spans(kFeatures)) {
    if (threadIdx.x % 32 == 0) shared.memories[warp].span = shared.spans[slot];
  }
  __syncwarp();
  if (threadIdx.x % 32 == 0) {
    shared.tile_empty[slot].arrive();
    shared.memories[warp].tiles_read = number + 1;
  }
  __syncwarp();
  return tile;
}

// The producer's side, by one thread.
template <Features kFeatures>
class TileWriter {
 public:
  __device__ __forceinline__ explicit TileWriter(Sm90Shared& shared) : shared_(shared) {}
  __device__ __forceinline__ void publish(const Sm90Tile& tile, const WalkSpan& span = {}) {
    shared_.tile_empty[state_.stage].wait(state_.parity ^ 1);
    shared_.tiles[state_.stage] = tile;
    if constexpr (has_spans(kFeatures)) shared_.spans[state_.stage] = span;
    shared_.tile_full[state_.stage].arrive();
    state_.advance(kSm90TileSlots);
  }

 private:
  Sm90Shared& shared_;
  tile::PipelineState state_;
};

}  // namespace kernel_pytorch::attention
