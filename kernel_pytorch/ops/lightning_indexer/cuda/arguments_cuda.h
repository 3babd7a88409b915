// What host and device agree on: where tensors lie, how the work is cut, and what of shared memory a kernel needs.
#pragma once

#include "kernel_pytorch/base/fixed_width.h"

namespace kernel_pytorch::lightning_indexer {

inline constexpr int kThreads = 128;
inline constexpr int kMostTileQueries = 4;  // of a block of threads: they share its reads of keys
inline constexpr int kTileHeads = 16;       // heads are padded to a multiple
inline constexpr int kChunkColumns = 32;    // so many columns of a row are two products of fragments
// A block's step is at most so many keys: each may add one candidate before the next look at how many there are.
inline constexpr int kStepKeys = kThreads;

struct Arguments {
  const void *query, *key;
  const float *weights, *key_scale;  // key_scale: or null
  const int32_t *lengths, *tables;   // or null
  int64_t query_batch, query_token, query_head, key_first, key_second;
  int64_t weights_batch, weights_token, weights_head, scale_first, scale_second;
  int32_t* indices;
  uint64_t* kept;     // of each block of threads in scratch memory; null: in shared memory
  uint64_t* partial;  // [batch, queries, splits, split_wanted] candidates, 0 where there are fewer; null: one split
  int32_t batch, queries, heads, size, page_size, table, pages, keys, top_k;
  int32_t tile_queries;  // of a block of threads
  int32_t splits, split_keys, split_wanted;
  int32_t wanted;    // how many a kernel keeps: of a split, or of all keys
  int32_t capacity;  // candidates that a query keeps until it drops what is not among its best
};

// A row of a query's head in shared memory, in 16-bit elements: rows begin 64 bytes apart modulo 128, so that the 16
// bytes that each lane of a warp reads lie in different banks.
KP_SHARED_CODE constexpr int32_t row_bytes(int32_t chunks) {
  return chunks * 64 + (chunks % 2 == 0 ? 64 : 0);
}
KP_SHARED_CODE constexpr int32_t padded_heads(const Arguments& a) {
  return (a.heads + kTileHeads - 1) / kTileHeads * kTileHeads;
}
// Rows and weights of a tile's queries.
KP_SHARED_CODE constexpr int64_t query_bytes(const Arguments& a, int32_t chunks) {
  return int64_t{a.tile_queries} * padded_heads(a) * (row_bytes(chunks) + 4);
}
KP_SHARED_CODE constexpr int64_t kept_bytes(const Arguments& a) {
  return int64_t{a.tile_queries} * a.capacity * 8;
}

}  // namespace kernel_pytorch::lightning_indexer
