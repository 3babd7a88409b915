// What the roles of a block of the backward share: where things lie in shared memory, the barriers between them, and
// which tiles of queries the block visits. sm_90a.
//
// One thread, the loader, walks over the tiles and writes down each step; the others read what they need of it.
#pragma once

#include "kernel_pytorch/cuda/tile/barrier.cuh"
#include "kernel_pytorch/cuda/tile/matrix_descriptor.cuh"
#include "kernel_pytorch/ops/attention/cuda/walk.cuh"
#include "kernel_pytorch/ops/attention/sm90/backward/place.cuh"

namespace kernel_pytorch::attention {

template <class T>
inline constexpr ptx::WgmmaType kMmaType = ptx::WgmmaType::kBf16;
template <>
inline constexpr ptx::WgmmaType kMmaType<tile::Float16> = ptx::WgmmaType::kF16;

inline constexpr int kExchangeSlots = 2;

// (kTile is a template argument everywhere: as a function's argument it would be read from memory.)
template <BackwardTile kTile>
struct BackwardBarriers {
  tile::Barrier* key;
  tile::Barrier* value;
  tile::Barrier* query_full;
  tile::Barrier* query_empty;
  tile::Barrier* grad_full;
  tile::Barrier* grad_empty;
  tile::Barrier* score_full;
  tile::Barrier* score_empty;
  tile::Barrier* exchange_full;  // wide heads
  tile::Barrier* exchange_empty;

  __device__ __forceinline__ explicit BackwardBarriers(void* memory) {
    key = static_cast<tile::Barrier*>(memory);
    value = key + 1;
    query_full = value + 1;
    query_empty = query_full + kTile.stages;
    grad_full = query_empty + kTile.stages;
    grad_empty = grad_full + kTile.stages;
    score_full = grad_empty + kTile.stages;
    score_empty = score_full + kTile.score_stages;
    exchange_full = score_empty + kTile.score_stages;
    exchange_empty = exchange_full + kExchangeSlots;
  }
  __device__ __forceinline__ void init() {
    // For a wide head one warpgroup computes dS; the other reads it, as the reducer does.
    constexpr int kKeyWarps = 8, kMakers = kTile.keys == 64 ? 4 : 8, kReaders = kTile.keys == 64 ? 8 : 4;
    key->init(1);
    value->init(1);
    for (int i = 0; i < kTile.stages; ++i) {
      query_full[i].init(1);
      query_empty[i].init(kKeyWarps);
      grad_full[i].init(1);
      grad_empty[i].init(kKeyWarps);
    }
    for (int i = 0; i < kTile.score_stages; ++i) {
      score_full[i].init(kMakers);
      score_empty[i].init(kReaders);
    }
    for (int i = 0; i < kExchangeSlots; ++i) {
      exchange_full[i].init(4);
      exchange_empty[i].init(4);
    }
  }
};

// A tile of queries that the block visits.
struct BackwardStep {
  int32_t tile;                                 // of the sequence
  int32_t member;                               // of the group of heads that share the keys
  bool is_edge, skips_program, skips_segments;  // as of a Step
};
// More than can be under way: the loader is at most the ring of tiles ahead of the keys, those the ring of dS ahead of
// the sums.
inline constexpr int kBackwardSteps = 8;

// Ids of a step's queries are compared by their range, which the loader hands on, where that has one change at most.
KP_SHARED_CODE constexpr bool compares_ranges(Features features) {
  return masks_early(features) && features.segments && !features.packed;
}

// What a block has to do.
struct BackwardWork {
  Head head;  // of the group's first
  int32_t key_head;
  int32_t section;       // of ZeroedSums
  int32_t memory_batch;  // of the tensors: 0 where sequences are packed
  int32_t first_key;     // of the block, in the sequence
  int32_t rows;          // of gradients that the block writes
  int32_t tile_base;     // of the first head's tile 0 among all tiles
  int32_t steps;         // of all heads of the group
  WalkSpan span;         // of each head, where they share it: without lists of tiles
  alignas(16) BackwardStep ring[kBackwardSteps];
  SegmentRange ranges[kBackwardSteps];  // of the ids of those queries, where compares_ranges and they are compared
  Step upcoming[32];                    // the loader's
};

// Offsets in bytes of dynamic shared memory; every tile begins at a multiple of 1024.
template <BackwardTile kTile>
struct BackwardShared {
  static constexpr int kKeyBytes = tile_bytes(kTile.keys, kTile.head);
  static constexpr int kValueBytes = tile_bytes(kTile.keys, kTile.value);
  static constexpr int kQueryBytes = tile_bytes(kTile.queries, kTile.head);
  static constexpr int kGradBytes = tile_bytes(kTile.queries, kTile.value);
  static constexpr int kScoreBytes = tile_bytes(kTile.keys, kTile.queries);
  static constexpr int kRecordBytes = 2 * kTile.queries * 4;

  static constexpr int kKey = 0;
  static constexpr int kValue = kKey + kKeyBytes;
  static constexpr int kQuery = kValue + kValueBytes;
  static constexpr int kGrad = kQuery + kTile.stages * kQueryBytes;
  static constexpr int kScore = kGrad + kTile.stages * kGradBytes;
  static constexpr int kExchange = kScore + kTile.score_stages * kScoreBytes;
  static constexpr int kRecord = kExchange + exchange_bytes(kTile);
  static constexpr int kBarriers = kRecord + kTile.stages * kRecordBytes;
  static constexpr int kWork = kBarriers + (1 + 2 * kTile.stages + kTile.score_stages + kExchangeSlots) * 16;
  static_assert(kWork + sizeof(BackwardWork) <= kBarriers + kBackwardSharedExtra);
  static_assert(kTile.stages + kTile.score_stages < kBackwardSteps);
};

template <Features kFeatures, BackwardTile kTile>
using QueryWalk = Walk<kFeatures, false, kTile.keys, kTile.queries, true>;

// The group's head `member`. Tile lists differ from head to head.
template <Features kFeatures>
__device__ __forceinline__ Head head_of_member(const ScoreArguments& score, const Head& first, int member) {
  if constexpr (kFeatures.alibi) return load_head<kFeatures>(score, first.batch, first.head + member);
  Head head = first;
  head.head += member;
  return head;
}

struct UnitBlock {
  int32_t unit, key_block;
};
__device__ __forceinline__ UnitBlock unit_block(const BackwardOrder& order, int block) {
  const int rest = block - order.units * order.full_blocks;
  if (rest >= 0) return {rest % order.units, order.full_blocks + rest / order.units};
  return {block / order.full_blocks, block % order.full_blocks};
}

// Everything but the steps, by all lanes of a warp.
template <Features kFeatures, BackwardTile kTile>
__device__ __forceinline__ BackwardWork find_keys(const BackwardArguments& arguments, int block) {
  const ScoreArguments& score = arguments.score;
  const int key_heads = score.heads / score.group;
  BackwardWork work;
  UnitBlock at = unit_block(arguments.order, block);
  work.section = at.unit / arguments.zeroed.section_units;
  if constexpr (kFeatures.blocks && !kFeatures.packed) {
    if (const int32_t* places = arguments.order.places; places != nullptr) {
      at = {places[block] / arguments.order.key_blocks, places[block] % arguments.order.key_blocks};
    }
  }
  int key_block = at.key_block;
  const int batch_head = at.unit;
  if constexpr (kFeatures.packed) {
    const int sequence = sequence_of_tile(score.key_offsets, score.batches, kTile.keys, key_block);
    work.key_head = batch_head;
    work.head = load_head<kFeatures>(score, sequence, work.key_head * score.group);
    work.memory_batch = 0;
    key_block -= static_cast<int>(tiles_before(work.head.first_key, sequence, kTile.keys));
    work.tile_base = work.head.head * arguments.tiles.tiles +
                     static_cast<int>(tiles_before(work.head.first_query, sequence, kTile.queries));
  } else {
    work.key_head = batch_head % key_heads;
    work.head = load_head<kFeatures>(score, batch_head / key_heads, work.key_head * score.group);
    work.memory_batch = work.head.batch;
    work.tile_base = (work.head.batch * score.heads + work.head.head) * arguments.tiles.tiles;
  }
  // Gradients of keys beyond a length are zeros, and written like others.
  int keys = score.keys;
  if constexpr (kFeatures.packed) {
    keys = score.key_offsets[work.head.batch + 1] - static_cast<int>(work.head.first_key);
  }
  work.first_key = key_block * kTile.keys;
  work.rows = least(kTile.keys, keys - work.first_key);
  work.steps = 0;
  return work;
}
template <Features kFeatures, BackwardTile kTile>
__device__ __forceinline__ void find_steps(BackwardWork& work, const ScoreArguments& score) {
  if (work.first_key >= work.head.keys) return;
  if constexpr (kFeatures.blocks) {
    for (int member = 0; member < score.group; ++member) {
      const Head head = head_of_member<kFeatures>(score, work.head, member);
      work.steps += QueryWalk<kFeatures, kTile>(score, head, work.first_key).count();
    }
  } else {
    const QueryWalk<kFeatures, kTile> walk(score, work.head, work.first_key);
    work.span = walk.span();
    work.steps = walk.count() * score.group;
  }
}

}  // namespace kernel_pytorch::attention
