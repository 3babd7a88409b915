// What host and device agree on for every attention kernel on the GPU: which options are compiled in, the arguments
// that say what stands between the products, and which keys a tile of queries can see (and the other way round).
//
// Names: a tile's fragment holds scores as tensor cores leave them. Scores are kept in base 2 (times log2 of e).
#pragma once

#include "kernel_pytorch/base/fixed_width.h"
#include "kernel_pytorch/cuda/tile/captures_cuda.h"
#include "kernel_pytorch/ops/attention/cuda/alignment_cuda.h"

namespace kernel_pytorch::attention {

// What is compiled in: a template value. An option that is absent leaves no instruction behind.
struct Features {
  bool right_bound = false;         // no key after query + right: causal, or a window's right side
  bool left_bound = false;          // no key before query + left: a window's left side
  bool key_lengths = false;         // of each batch
  bool packed = false;              // sequences one after the other, by offsets
  bool segments = false;            // ids that must be equal
  bool mask = false;                // a boolean for each score
  bool mask_mod = false;            // a program that keeps
  bool blocks = false;              // lists of tiles
  bool block_map = false;           // lists whose tiles are not this kernel\'s, as a byte for each tile
  bool alibi = false;               // a slope for each head
  bool alibi_is_one_sided = false;  // and no key comes after its query + offset, so that no absolute value is needed
  bool bias = false;                // of the elements' type
  bool float_bias = false;          // fp32
  bool bias_pairs = false;          // two keys of a bias may be read at once
  bool softcap = false;             // before bias and ALiBi
  bool softcap_after = false;       // after them
  bool exact_tanh = false;          // softcap to 1e-7 of the cap, where the special unit's tanh has 5e-4
  bool score_mod = false;           // a program that changes scores
  bool score_mod_adds = false;      // and has the derivative 1
  bool scaled = false;  // scores are multiplied by the scale before the softmax, which takes positive scales only
  bool sinks = false;   // a logit more in each row
  bool dropout = false;
  bool tf32 = false;        // products of fp32 in one pass of tf32
  bool float_tanh = false;  // softcap to fp32's rounding
};

KP_SHARED_CODE constexpr bool has_bias(Features features) {
  return features.bias || features.float_bias;
}
// Scores are more than a positive multiple of the product: change_scores (attention/cuda/score.cuh) gives them.
KP_SHARED_CODE constexpr bool changes_scores(Features features) {
  return features.alibi || has_bias(features) || features.softcap || features.softcap_after || features.score_mod ||
         features.scaled;
}
// Scores are a positive multiple of the product and a multiple of the key's place.
KP_SHARED_CODE constexpr bool folds_alibi(Features features) {
  features.alibi = false;
  return features.alibi_is_one_sided && !changes_scores(features);
}
// The derivative of a score to the scaled product is not 1 everywhere.
KP_SHARED_CODE constexpr bool has_derivative(Features features) {
  return features.softcap || features.softcap_after || (features.score_mod && !features.score_mod_adds);
}
// Tiles in the interior of all bounds need their conditions asked all the same.
KP_SHARED_CODE constexpr bool masks_every_tile(Features features) {
  return features.mask || features.block_map || (features.mask_mod && !features.blocks);
}

// On Hopper what is kept of scores is found while their product runs: by bounds and ids. Lists, masks and programs need
// more registers than a step has left besides its products.
KP_SHARED_CODE constexpr bool masks_early(Features features) {
  return !features.blocks && !masks_every_tile(features);
}

// Where a walk over tiles (attention/cuda/walk.cuh) begins and ends, and tiles side by side whose rows and columns all
// have one segment id: where segments are what a kernel was planned by, else none.
struct alignas(16) WalkSpan {
  int32_t first_tile, last_tile;
  int32_t one_first, one_last;
};

// [batch, head, row, column] with dense columns; strides in elements.
struct RowTensor {
  void* data;
  int64_t batch, head, row;
};

// One value for each score or less: strides in elements, 0 where broadcast.
struct ScoreTensor {
  const void* data;
  int64_t batch, head, query, key;
};

// What is known of the ids of 64 rows: the least and the greatest, and where they change, if they do so once. Rows
// before `split` have the id `first`, the others the other one of the two; 0: there are more changes.
struct alignas(16) SegmentRange {
  int32_t low, high;
  int32_t first, split;
};
inline constexpr int32_t kSegmentRangeRows = 64;

// Ids of rows, and of each 64 rows their range (null: unknown), which a kernel of ours writes first.
struct SegmentIds {
  const int32_t* ids;
  int64_t batch, row;          // strides in elements
  const SegmentRange* ranges;  // [batch, blocks of 64 rows]
  int64_t ranges_batch;        // stride
};

// For each block of rows the blocks of columns that have something: partial ones first. Strides in elements.
struct BlockIndex {
  const int32_t* counts;
  const int32_t* blocks;
  int64_t counts_batch, counts_head, counts_row;
  int64_t blocks_batch, blocks_head, blocks_row, blocks_place;
};
struct BlockLists {
  int32_t rows, columns;     // of a block
  BlockIndex partial, full;  // full.counts may be null
};

// The state of each tile: 0 empty, 1 partial, 2 full. [batch, head, query block, key block], strides in bytes.
struct BlockMap {
  const uint8_t* states;
  int64_t batch, head, row;
};
inline constexpr uint8_t kPartialBlock = 1, kFullBlock = 2;

// In which order the tiles of lists are taken (attention/cuda/list_order.cuh): places, unit * tiles + tile, where a
// unit is a head of a batch; of keys, one of the heads that have keys.
struct ListOrderArguments {
  BlockLists lists;
  int32_t tiles, row_tiles;  // of a unit, of a row of blocks
  int32_t units, heads;      // heads: of a batch, that have lists
  int32_t group;             // of them, that a unit has
  int32_t section_units;     // sorted by themselves, section after section
  int32_t* lengths;          // [units * tiles], scratch
  int32_t* order;            // [units * tiles]
};

inline constexpr int kMaximumCaptured = 8;

struct ScoreArguments {
  int32_t batches, heads, group;     // batches: sequences if packed; group: query heads that share a key head
  int32_t queries, keys;             // packed: of the longest sequence
  int64_t query_tokens, key_tokens;  // packed: rows of the tensors
  int32_t left, right;               // kept: left <= k - q - offset <= right
  int32_t offset;                    // where `has_offset`; else aligned_offset
  bool has_offset;
  int32_t part_query, part_key;          // of the whole: what programs and dropout add to a query and a key
  float scale;                           // of the product
  float softcap, softcap_reciprocal;     // in natural units
  ScoreTensor bias, mask, alibi_slopes;  // alibi_slopes: batch and head only
  const float* sinks;                    // [heads]
  int64_t sinks_stride;
  SegmentIds query_segments, key_segments;
  const WalkSpan* key_spans;    // [batch, tile of queries], found ahead (attention/cuda/segment_plan.cuh), or null
  const WalkSpan* query_spans;  // [batch, tile of keys]
  const int32_t* key_lengths;
  int64_t key_lengths_stride;
  const int32_t* query_offsets;
  const int32_t* key_offsets;
  BlockLists key_blocks;    // rows: queries
  BlockLists query_blocks;  // rows: keys
  BlockMap block_map;
  const int64_t* seed;  // seed, offset
  uint32_t dropout_threshold;
  float dropout_scale;
  tile::CapturedTensor captured[kMaximumCaptured];  // what the programs read
};

inline constexpr float kLog2e = 1.4426950408889634f;
inline constexpr float kLn2 = 0.6931471805599453f;

// A head of a batch or sequence, and what its queries may see.
struct Head {
  int32_t batch, head;
  int32_t queries, keys;           // of this sequence, after key lengths
  int32_t left, right;             // kept: q + left <= k <= q + right
  int32_t offset;                  // of the diagonal: the key at distance 0 of query 0
  int64_t first_query, first_key;  // row of the tensors at which the sequence begins
  float slope;                     // of ALiBi, in base 2
};

// The position of a score, counted within its sequence.
struct Place {
  int32_t query, key;
};

// Half-open ranges of rows of the other kind that a tile can see, and those of them that all of its rows see, as far as
// bounds and lengths go.
struct TileRange {
  int32_t first, last;
  int32_t whole_first, whole_last;
};

KP_SHARED_CODE constexpr int32_t least(int32_t a, int32_t b) {
  return a < b ? a : b;
}
KP_SHARED_CODE constexpr int32_t greatest(int32_t a, int32_t b) {
  return a > b ? a : b;
}

// The key tiles that queries [first, last) see; last <= head.queries.
KP_SHARED_CODE constexpr TileRange keys_of_queries(Features features, const Head& head, int32_t first, int32_t last) {
  TileRange range{0, head.keys, 0, head.keys};
  if (features.right_bound) {
    range.last = greatest(0, least(head.keys, last + head.right));
    range.whole_last = greatest(0, least(head.keys, first + head.right + 1));
  }
  if (features.left_bound) {
    range.first = greatest(0, first + head.left);
    range.whole_first = greatest(0, last - 1 + head.left);
  }
  if (range.first > range.last) range.first = range.last;
  return range;
}

// The query tiles that see keys [first, last); last <= head.keys.
KP_SHARED_CODE constexpr TileRange queries_of_keys(Features features, const Head& head, int32_t first, int32_t last) {
  TileRange range{0, head.queries, 0, head.queries};
  if (features.right_bound) {
    range.first = greatest(0, first - head.right);
    range.whole_first = greatest(0, last - 1 - head.right);
  }
  if (features.left_bound) {
    range.last = greatest(0, least(head.queries, last - head.left));
    range.whole_last = greatest(0, least(head.queries, first - head.left + 1));
  }
  if (range.first > range.last) range.first = range.last;
  return range;
}

}  // namespace kernel_pytorch::attention
