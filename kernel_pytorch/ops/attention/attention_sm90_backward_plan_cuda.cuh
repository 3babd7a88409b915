// What the roles of a block of the backward share: where things lie in shared memory, the barriers between them, and
// which tiles of queries the block walks. sm_90a.
#pragma once

#include "kernel_pytorch/cuda/tile/barrier.cuh"
#include "kernel_pytorch/cuda/tile/matrix_descriptor.cuh"
#include "kernel_pytorch/ops/attention/attention_sm90_backward_place_cuda.cuh"
#include "kernel_pytorch/ops/attention/attention_walk_cuda.cuh"

namespace kernel_pytorch::attention {

template <class T>
inline constexpr ptx::WgmmaType kMmaType = ptx::WgmmaType::kBf16;
template <>
inline constexpr ptx::WgmmaType kMmaType<tile::Float16> = ptx::WgmmaType::kF16;

struct BackwardBarriers {
  tile::Barrier* key;
  tile::Barrier* value;
  tile::Barrier* query_full;
  tile::Barrier* query_empty;
  tile::Barrier* grad_full;
  tile::Barrier* grad_empty;
  tile::Barrier* score_full;
  tile::Barrier* score_empty;

  __device__ __forceinline__ BackwardBarriers(void* memory, BackwardTile tile) {
    key = static_cast<tile::Barrier*>(memory);
    value = key + 1;
    query_full = value + 1;
    query_empty = query_full + tile.stages;
    grad_full = query_empty + tile.stages;
    grad_empty = grad_full + tile.stages;
    score_full = grad_empty + tile.stages;
    score_empty = score_full + tile.score_stages;
  }
  __device__ __forceinline__ void init(BackwardTile tile) {
    constexpr int kConsumerWarps = 8, kReducerWarps = 4;
    key->init(1);
    value->init(1);
    for (int i = 0; i < tile.stages; ++i) {
      query_full[i].init(1);
      query_empty[i].init(kConsumerWarps);
      grad_full[i].init(1);
      grad_empty[i].init(kConsumerWarps);
    }
    for (int i = 0; i < tile.score_stages; ++i) {
      score_full[i].init(kConsumerWarps);
      score_empty[i].init(kReducerWarps);
    }
  }
};

// The tiles of queries that a block of keys meets, for each head of the group in turn.
struct BackwardWork {
  Head head;  // of the group's first
  int32_t key_head;
  int32_t memory_batch;  // of the tensors: 0 where sequences are packed
  int32_t first_key;     // of the block, in the sequence
  int32_t first_tile, last_tile;
  int32_t whole_first, whole_last;  // tiles in which every score of this block is kept, as far as bounds go
  int32_t tile_base;                // of the first head's tile 0 among all tiles
  int32_t steps;                    // of all heads of the group
};

// Offsets in bytes of dynamic shared memory; every tile begins at a multiple of 1024.
template <BackwardTile kTile>
struct BackwardShared {
  static constexpr int kKeyBytes = tile_bytes(kBackwardKeys, kTile.head);
  static constexpr int kValueBytes = tile_bytes(kBackwardKeys, kTile.value);
  static constexpr int kQueryBytes = tile_bytes(kTile.queries, kTile.head);
  static constexpr int kGradBytes = tile_bytes(kTile.queries, kTile.value);
  static constexpr int kScoreBytes = tile_bytes(kBackwardKeys, kTile.queries);
  static constexpr int kRecordBytes = 2 * kTile.queries * 4;

  static constexpr int kKey = 0;
  static constexpr int kValue = kKey + kKeyBytes;
  static constexpr int kQuery = kValue + kValueBytes;
  static constexpr int kGrad = kQuery + kTile.stages * kQueryBytes;
  static constexpr int kScore = kGrad + kTile.stages * kGradBytes;
  static constexpr int kRecord = kScore + kTile.score_stages * kScoreBytes;
  static constexpr int kBarriers = kRecord + kTile.stages * kRecordBytes;
  static constexpr int kWork = kBarriers + (2 + 4 * kTile.stages + 2 * kTile.score_stages) * 8;
  static_assert(kWork + sizeof(BackwardWork) <= kBarriers + kBackwardSharedExtra);
};

struct TileWalk {
  int32_t tile;
  int32_t member = 0;  // of the group

  __device__ __forceinline__ explicit TileWalk(const BackwardWork& work) : tile(work.first_tile) {}
  __device__ __forceinline__ void advance(const BackwardWork& work) {
    if (++tile == work.last_tile) {
      tile = work.first_tile;
      ++member;
    }
  }
};

template <Features kFeatures, BackwardTile kTile>
__device__ __forceinline__ BackwardWork backward_work(const BackwardArguments& arguments, int block) {
  const ScoreArguments& score = arguments.score;
  const int key_heads = score.heads / score.group;
  BackwardWork work;
  const int key_block = block % arguments.key_blocks;
  const int batch_head = block / arguments.key_blocks;
  work.key_head = batch_head % key_heads;
  const Head head = load_head<kFeatures>(score, batch_head / key_heads, work.key_head * score.group);
  work.head = head;
  work.memory_batch = kFeatures.packed ? 0 : head.batch;
  work.first_key = key_block * kBackwardKeys;
  const int last_key = least(work.first_key + kBackwardKeys, head.keys);
  const TileRange range = queries_of_keys(kFeatures, head, work.first_key, last_key);
  work.first_tile = range.first / kTile.queries;
  work.last_tile = (range.last + kTile.queries - 1) / kTile.queries;
  work.whole_first = (range.whole_first + kTile.queries - 1) / kTile.queries;
  // Rows past the last query have no part in anything, so a last tile that ends early is as good as whole.
  work.whole_last = range.whole_last >= head.queries ? work.last_tile : range.whole_last / kTile.queries;
  if (work.first_key + kBackwardKeys > head.keys) work.whole_last = 0;
  work.tile_base = (head.batch * score.heads + head.head) * arguments.tiles.tiles;
  work.steps = range.first < range.last ? (work.last_tile - work.first_tile) * score.group : 0;
  return work;
}

}  // namespace kernel_pytorch::attention
