// What host and device agree on for the backward of attention on sm_90: the tile that is compiled, what lies where in
// memory, and the arguments of its kernels.
//
// Three launches: prepare (delta, records, the first zeroed sums), main (a block per 128 keys, all five products, and
// zeroed sums for blocks to come), finish (sums to grad_query). Sums of grad_query and records lie in the order in
// which the tensor cores' registers hold them, so that nothing is shuffled on the way.
#pragma once

#include "kernel_pytorch/cuda/tile/tensor_map_cuda.h"
#include "kernel_pytorch/ops/attention/cuda/arguments_cuda.h"

namespace kernel_pytorch::attention {

// Template arguments besides the features. Head sizes are padded to these with zeros by the copy engine.
struct BackwardTile {
  int head = 64, value = 64;  // multiples of 32 up to 128, or of 64 up to 256
  int keys = 128;             // of a block: 128; 64 for heads of more than 128 columns
  int queries = 64;           // rows of a step: 64, or 128 for small heads
  int stages = 3;             // of the rings of query and grad_output
  int score_stages = 3;       // of the ring of dS between the warpgroups
  int sum_columns = 64;       // of one product of dQ: 64; 32 leaves its registers to the other warpgroups
  bool in_turns = false;      // blocks add to grad_query in a fixed order
};
inline constexpr int kBackwardThreads = 512, kPrepareThreads = 256, kFinishThreads = 128, kSinkThreads = 128;
inline constexpr int kBackwardSharedLimit = 232448;  // of a block on compute capability 9.0
inline constexpr int kBackwardSharedExtra = 2048;    // bytes besides tiles and records: barriers and similar

// Tiles lie in chunks of 64 columns, 128 bytes a row.
KP_SHARED_CODE constexpr int tile_bytes(int rows, int columns) {
  return (columns + 63) / 64 * rows * 128;
}
// Bytes in which the warpgroups of a wide head exchange probabilities.
KP_SHARED_CODE constexpr int exchange_bytes(BackwardTile tile) {
  return tile.keys == 64 ? 16384 : 0;
}
KP_SHARED_CODE constexpr int backward_shared_bytes(BackwardTile tile) {
  const int keys = tile_bytes(tile.keys, tile.head) + tile_bytes(tile.keys, tile.value);
  const int stage = tile_bytes(tile.queries, tile.head) + tile_bytes(tile.queries, tile.value) + 2 * tile.queries * 4;
  const int scores = tile.score_stages * tile_bytes(tile.keys, tile.queries);
  return keys + tile.stages * stage + scores + exchange_bytes(tile) + kBackwardSharedExtra;
}

KP_SHARED_CODE constexpr bool is_legal(BackwardTile tile) {
  const bool is_wide = tile.head > 128;
  return backward_shared_bytes(tile) <= kBackwardSharedLimit && tile.head % 32 == 0 && tile.value % 32 == 0 &&
         tile.head <= 256 && tile.value <= 256 && tile.keys == (is_wide ? 64 : 128) &&
         (tile.queries == 64 || (tile.queries == 128 && tile.head == 64)) && tile.stages >= 2 &&
         tile.score_stages >= 2 && tile.sum_columns % 32 == 0 && tile.sum_columns <= tile.head;
}

// The first tile of packed sequence i. It owns as many tiles as it can need, or one more.
KP_SHARED_CODE constexpr int64_t tiles_before(int64_t offset, int sequence, int rows) {
  return offset / rows + sequence;
}

// Tiles of queries count over (batch, head, tile) or, packed, over (head, tile of all sequences).
struct QueryTiles {
  int32_t tiles;       // of a head
  int32_t tile_count;  // of all
};

// A record: for each 64 queries their -lse in base 2 (-inf: takes part in nothing) plus the exponent that
// probabilities are scaled by, then likewise -delta. Of query
// 8 j + 2 c + e the place is ((j / 2) * 4 + c) * 4 + j % 2 * 2 + e: four vectors for each lane c of a quad.
KP_SHARED_CODE constexpr int record_place(int query) {
  const int j = query / 8 % 8, c = query % 8 / 2, e = query % 2;
  return query / 64 * 64 + ((j / 2) * 4 + c) * 4 + j % 2 * 2 + e;
}

// In which order blocks of keys are launched: of each unit (a head of the keys in a batch) its first `full_blocks`,
// unit after unit, then the others, which are shorter, one of every unit at a time: they fill the gaps at the end.
struct BackwardOrder {
  int32_t key_blocks;   // of a unit; packed: of all tokens
  int32_t full_blocks;  // of them; at least 1
  int32_t units;
  const int32_t* places;  // of blocks with lists instead: unit * key_blocks + block, section after section; or null
};
// Sums are zeroed `sections_ahead` sections of units before they are added to, by main; those of the first by prepare.
struct ZeroedSums {
  int32_t section_units;  // divides the units
  int32_t sections, sections_ahead;
  uint32_t* counts;  // of each section: warps that have zeroed their share
};
inline constexpr int kZeroWarps = 3;  // of a block

struct PrepareArguments {
  ScoreArguments score;
  RowTensor output, grad_output;
  const float* lse;
  const float* grad_lse;  // may be null
  float* records;         // [tiles, 2, queries of a tile]
  float* grad_query_sums;
  float* sink_sums;  // of each tile, or null
  uint32_t* turns;   // of each tile, or null
  QueryTiles tiles;
  ZeroedSums zeroed;
  int32_t columns;      // of a value
  int32_t sum_columns;  // of a tile of sums
};

struct alignas(64) BackwardArguments {
  tile::TensorMap query, key, value, grad_output;  // boxes of 64 rows by 64 columns
  ScoreArguments score;
  RowTensor grad_key, grad_value;
  const float* records;
  float* grad_query_sums;
  uint32_t* turns;  // deterministic: how many blocks of keys have added to a tile
  QueryTiles tiles;
  BackwardOrder order;
  ZeroedSums zeroed;
  int32_t head_columns, value_columns;  // that exist
  bool accumulates;                     // gradients of keys and values, then fp32, are added to
};

struct FinishArguments {
  ScoreArguments score;
  RowTensor grad_query;
  const float* grad_query_sums;
  QueryTiles tiles;
  int32_t columns;
  bool accumulates;  // grad_query, then fp32, is added to
};

struct SinkArguments {
  const float* sums;
  float* grad_sinks;
  int64_t stride;
  int32_t tiles, heads, batches;
};

}  // namespace kernel_pytorch::attention
