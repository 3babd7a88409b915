// The indexer as the registry sees it: where keys lie, which score goes first, and the kernels that its list names.
#pragma once

#include <algorithm>

#include "kernel_pytorch/ops/lightning_indexer/lightning_indexer.h"
#include "kernel_pytorch/registry/kernel.h"

namespace kernel_pytorch::lightning_indexer {

struct Sizes {
  int64_t batch, queries, heads, size, page_size, table, keys;  // keys: the most that an entry can have

  explicit Sizes(const Index& problem)
      : batch(problem.query.sizes[0]),
        queries(problem.query.sizes[1]),
        heads(problem.query.sizes[2]),
        size(problem.query.sizes[3]),
        page_size(problem.key.sizes[1]),
        table(problem.block_tables.is_present() ? problem.block_tables.sizes[1] : 0),
        keys(problem.block_tables.is_present() ? table * page_size : problem.key.sizes[1]) {}
};

// Of lengths and tables that the host may read.
inline int64_t keys_of(const Index& problem, const Sizes& sizes, int64_t batch) {
  if (!problem.key_lengths.is_present()) return sizes.keys;
  return std::clamp<int64_t>(problem.key_lengths.as<const int32_t>()[batch], 0, sizes.keys);
}
// The first two indices into `key` and key_scale of an entry's key.
struct Place {
  int64_t first, second;
};
inline Place place_of(const Index& problem, const Sizes& sizes, int64_t batch, int64_t key) {
  if (!problem.block_tables.is_present()) return {batch, key};
  const int32_t page = problem.block_tables.as<const int32_t>()[batch * sizes.table + key / sizes.page_size];
  return {page, key % sizes.page_size};
}
inline int32_t index_of(const Index& problem, const Sizes& sizes, int64_t batch, int64_t key) {
  const Place place = place_of(problem, sizes, batch, key);
  return static_cast<int32_t>(problem.block_tables.is_present() ? place.first * sizes.page_size + place.second : key);
}

template <class Number>
struct Candidate {
  Number score;
  int32_t key;
};
template <class Number>
bool goes_first(const Candidate<Number>& a, const Candidate<Number>& b) {
  const bool a_is_nan = a.score != a.score, b_is_nan = b.score != b.score;
  if (a_is_nan != b_is_nan) return b_is_nan;
  return !a_is_nan && a.score != b.score ? a.score > b.score : a.key < b.key;
}

void check(const Index& problem, Device device);

extern const registry::Operation<Index> kIndex;
extern const registry::Kernel<Index> kIndexReference, kIndexCpu, kIndexCuda, kIndexMma;

}  // namespace kernel_pytorch::lightning_indexer
