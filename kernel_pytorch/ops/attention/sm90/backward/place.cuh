// Which sequence, head and rows a block of the backward's kernels has: by division, or for packed sequences by a search
// of their offsets, 32 at a time. sm_90.
#pragma once

#include "kernel_pytorch/cuda/tile/element.cuh"
#include "kernel_pytorch/ops/attention/sm90/backward/tile_cuda.h"

namespace kernel_pytorch::attention {

// Probabilities, dS and all sums of bf16 are times 2^5 until they are stored, so that a copy of probabilities in fp16
// (Copy in the keys' part) is precise down to 2^-19 and holds, should an lse be too small for its scores, up to 2047.
// dS of fp16 could overflow.
template <class T>
inline constexpr float kExponent = 5.0f;
template <>
inline constexpr float kExponent<tile::Float16> = 0.0f;
template <class T>
inline constexpr float kUnscale = 1.0f / 32;
template <>
inline constexpr float kUnscale<tile::Float16> = 1.0f;

// The last sequence whose first tile (tiles_before) is at most `tile`; all lanes of the warp take part.
__device__ __forceinline__ int sequence_of_tile(const int32_t* offsets, int sequences, int rows, int tile) {
  const int lane = threadIdx.x % 32;
  int first = 0, count = sequences;
  while (count > 1) {
    const int step = (count + 31) / 32;
    const int at = first + lane * step;
    const bool begins = lane * step < count && tiles_before(offsets[at], at, rows) <= tile;
    const int found = __popc(__ballot_sync(0xffffffffu, begins)) - 1;
    first += found * step;
    count = least(step, count - found * step);
  }
  return first;
}

struct QueryTilePlace {
  int32_t batch, memory_batch;  // sequence; 0 where packed
  int32_t head, tile;           // tile of the sequence
  int32_t queries;              // of the sequence
  int64_t first_query;          // its row in the tensors
  int64_t row_of_heads;         // of (batch, head) in [batch, head, row]
};

template <bool kPacked>
__device__ __forceinline__ QueryTilePlace query_tile_place(const ScoreArguments& score, const QueryTiles& tiles,
                                                           int block, int rows) {
  QueryTilePlace place;
  const int batch_head = block / tiles.tiles;
  place.tile = block % tiles.tiles;
  if constexpr (kPacked) {
    place.batch = sequence_of_tile(score.query_offsets, score.batches, rows, place.tile);
    place.memory_batch = 0;
    place.head = batch_head;
    place.first_query = score.query_offsets[place.batch];
    place.queries =
        least(score.query_offsets[place.batch + 1] - static_cast<int32_t>(place.first_query), score.queries);
    place.tile -= static_cast<int32_t>(tiles_before(place.first_query, place.batch, rows));
    place.row_of_heads = place.head * score.query_tokens;
  } else {
    place.batch = place.memory_batch = batch_head / score.heads;
    place.head = batch_head % score.heads;
    place.first_query = 0;
    place.queries = score.queries;
    place.row_of_heads = static_cast<int64_t>(batch_head) * score.queries;
  }
  return place;
}

}  // namespace kernel_pytorch::attention
