// The walk of a block of threads over keys: a scorer gives each thread the score of one key for one query after the
// other, and the query's best are kept. A block has a few queries of one entry and one of the splits of the keys; where
// there are several, `merge` takes the best of what they kept.
#pragma once

#include "kernel_pytorch/ops/lightning_indexer/cuda/best.cuh"

namespace kernel_pytorch::lightning_indexer {

struct State {
  uint64_t least[kMostTileQueries];
  int32_t counts[kMostTileQueries];
};
__device__ __forceinline__ Best best_of(const Arguments& a, State& state, uint64_t* kept, int32_t query) {
  return {kept + static_cast<int64_t>(query) * a.capacity, &state.counts[query], &state.least[query]};
}

template <class Scorer>
__device__ __forceinline__ void choose_keys(const Arguments& a, char* shared) {
  __shared__ State state;
  const auto thread = static_cast<int32_t>(threadIdx.x);
  const int32_t tiles = (a.queries + a.tile_queries - 1) / a.tile_queries;
  const int64_t items = static_cast<int64_t>(a.batch) * tiles * a.splits;
  auto* kept = a.kept != nullptr ? a.kept + static_cast<int64_t>(blockIdx.x) * a.tile_queries * a.capacity
                                 : reinterpret_cast<uint64_t*>(shared + (Scorer::shared_bytes(a) + 7) / 8 * 8);
  for (int64_t item = blockIdx.x; item < items; item += gridDim.x) {
    const auto split = static_cast<int32_t>(item % a.splits);
    const int32_t tile = tiles - 1 - static_cast<int32_t>(item / a.splits % tiles);  // the longest first
    const auto batch = static_cast<int32_t>(item / a.splits / tiles);
    const int32_t first_query = tile * a.tile_queries, queries = min(a.tile_queries, a.queries - first_query);
    const int32_t last_key = last_key_of(a, batch, first_query);  // of the first query; each next one sees one more
    const int32_t begin = split * a.split_keys;
    int32_t end = min(begin + a.split_keys, last_key + queries);
    if (takes_all(a, last_key + queries - 1)) end = 0;
    __syncthreads();  // the item before is done with shared memory
    Scorer scorer(a, shared, batch, first_query, queries);
    if (thread < kMostTileQueries) state.counts[thread] = 0, state.least[thread] = 1;
    __syncthreads();
    for (int32_t base = begin; base < end; base += Scorer::kKeys) {
      for (int32_t query = 0; query < queries; ++query) {
        const Best best = best_of(a, state, kept, query);
        if (*best.count > a.capacity - Scorer::kKeys) shrink(best, a.wanted);
      }
      __syncthreads();  // all have looked at the counts, and the scorer may add
      scorer.load_keys(base, end);
      for (int32_t query = 0; query < queries; ++query) {
        const float score = scorer.score(query);
        const int32_t key = scorer.key();
        const bool is_seen = scorer.has_key() && key <= last_key + query;
        offer(best_of(a, state, kept, query), is_seen ? candidate_of(score, key) : 0);
      }
      __syncthreads();
    }
    for (int32_t query = 0; query < queries; ++query) {
      const Best best = best_of(a, state, kept, query);
      const int32_t token = first_query + query;
      const bool takes = takes_all(a, last_key + query);
      if (a.partial == nullptr && takes) {
        write_all(a, batch, token, last_key + query);
        continue;
      }
      shrink(best, a.wanted);
      if (a.partial == nullptr) {
        write_sorted(a, best, batch, token);
        continue;
      }
      const int64_t row = (static_cast<int64_t>(batch) * a.queries + token) * a.splits + split;
      for (int32_t i = thread; i < a.split_wanted; i += kThreads) {
        a.partial[row * a.split_wanted + i] = i < *best.count ? best.kept[i] : 0;
      }
    }
  }
}

}  // namespace kernel_pytorch::lightning_indexer
