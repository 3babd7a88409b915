// What host and device agree on for the kernels on mma: the tile of a block of threads, and its shared memory.
//
// A tile has 64 or 128 rows: a few neighbouring tokens by the heads that share a key head. A token has 1 << head_shift
// rows, those beyond the group's heads are empty.
#pragma once

#include "kernel_pytorch/ops/native_sparse_attention/cuda/arguments_cuda.h"

namespace kernel_pytorch::native_sparse_attention {

inline constexpr int kMmaWarps = 4, kMmaThreads = kMmaWarps * 32;
inline constexpr int kMmaRows = kMmaWarps * 16;
inline constexpr int kMmaKeys = 64;   // of a step
inline constexpr int kMmaPart = 32;   // columns of scores that a thread of the backward holds at once
inline constexpr int kMostShift = 4;  // 16 heads of a group: a warp's rows
inline constexpr int kMmaStages = 2;  // steps whose keys and values are in shared memory

// What the backward of keys reads of a query and branch: the lse in base 2, the sum of P * dP, the gate.
struct alignas(16) Statistics {
  float lse, delta, gate, unused;
};

struct MmaArguments {
  Arguments all;
  int32_t row_blocks;  // of 16 rows, that a warp has: 1, or 2 where parts of the work lie in scratch memory
  int32_t head_shift;  // log2 of the rows of a token
  int32_t tiles;       // of an entry of the batch
  // Of each block of threads, where a warp has two blocks of rows
  float* parked;        // results of the branches so far
  float* block_scores;  // [token, key_blocks]
  // Backward
  Statistics* statistics[kBranches];  // [batch, queries, heads]
  uint32_t* seen_by;                  // [batch, key_heads, key_blocks, words]: the tokens that chose a block, by bits
  int32_t words;                      // of 32 tokens
  int32_t* repeats;                   // whether any list names a block twice
  float* partial;  // [item, 64 keys, key and value]: sums of a tile of keys over a share of the tokens
  // Tiles of keys: of `tile_block` keys each block has `block_tiles`. The first ones are done in `splits` items each.
  int32_t tile_block, block_tiles, key_tiles, first_tiles, splits;
};
KP_SHARED_CODE constexpr int64_t key_items(const MmaArguments& a) {
  return int64_t{a.first_tiles} * a.splits + a.key_tiles - a.first_tiles;
}

// A row in shared memory: 16 bytes more than its elements, so that eight rows at one column lie in eight banks.
KP_SHARED_CODE constexpr int row_pitch(int size) {
  return size * 2 + 16;
}
KP_SHARED_CODE constexpr int32_t tile_tokens(const MmaArguments& a) {
  return kMmaRows * a.row_blocks >> a.head_shift;
}
KP_SHARED_CODE constexpr int32_t bit_words(const MmaArguments& a) {
  return (tile_tokens(a) + 31) / 32;
}

// Bytes: rows (queries, and of the backward gradients of the output), keys and values of the stages, places, lists,
// importance of a step, and scores of blocks (where these are not in scratch memory) or, later, the tokens that chose
// each.
KP_SHARED_CODE constexpr int64_t mma_shared_bytes(const MmaArguments& a, int size, bool is_backward) {
  const int64_t tokens = tile_tokens(a), rows = int64_t{kMmaRows} * a.row_blocks * (is_backward ? 2 : 1);
  const int64_t blocks = a.all.chooses && a.row_blocks == 1 ? tokens * a.all.key_blocks
                         : a.all.gates[1].data != nullptr   ? int64_t{bit_words(a)} * a.all.key_blocks
                                                            : 0;
  return (rows + 2 * kMmaStages * kMmaKeys) * row_pitch(size) +
         4 * (tokens * (3 + a.all.list_length) + (a.all.chooses ? tokens * kMmaKeys : 0) + blocks);
}
// Keys and values of a tile, queries and gradients of the output of the stages, their statistics, three steps' tokens
// and how often each has the block.
KP_SHARED_CODE constexpr int64_t mma_tile_shared_bytes(int size) {
  return int64_t{2} * (kMmaKeys + kMmaStages * kMmaRows) * row_pitch(size) +
         int64_t{kMmaStages} * kMmaRows * int64_t{sizeof(Statistics)} + int64_t{3} * kMmaRows * 8;
}

}  // namespace kernel_pytorch::native_sparse_attention
