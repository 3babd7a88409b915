// The best candidates of a query, kept by a block of threads while they come in any order.
//
// A candidate is 64 bits: its score as an integer that orders alike, then the complement of its key. No two are equal,
// and the greater goes first, so that the best are one set whatever the order in which threads offer them. They gather
// behind each other; when there is no room for one more step, a radix selection finds the least of the best, and what
// is below it is dropped now and refused from then on. Sorted by key once, at the end. sm_80.
#pragma once

#include "kernel_pytorch/base/fixed_width.h"
#include "kernel_pytorch/ops/lightning_indexer/cuda/arguments_cuda.h"

namespace kernel_pytorch::lightning_indexer {

// Never 0, which is none. NaN is below all numbers, and both zeros are one.
__device__ __forceinline__ uint64_t candidate_of(float score, int32_t key) {
  const uint32_t bits = score == 0.0f ? 0u : __float_as_uint(score);
  const uint32_t ordered = score != score ? 0u : (bits >> 31) != 0 ? ~bits : bits | 0x80000000u;
  return static_cast<uint64_t>(ordered) << 32 | ~static_cast<uint32_t>(key);
}
__device__ __forceinline__ int32_t key_of(uint64_t candidate) {
  return static_cast<int32_t>(~static_cast<uint32_t>(candidate));
}

struct Best {
  uint64_t* kept;
  int32_t* count;
  uint64_t* least;  // what is below it is not among the best; at least 1
};

// Room behind the kept ones for each lane that asks, all lanes of a warp together.
__device__ __forceinline__ void append(uint64_t* kept, int32_t* count, bool is_one, uint64_t candidate) {
  const uint32_t votes = __ballot_sync(0xffffffffu, is_one);
  if (votes == 0) return;
  const int lane = threadIdx.x % 32, leader = __ffs(static_cast<int>(votes)) - 1;
  int32_t begin = 0;
  if (lane == leader) begin = atomicAdd(count, __popc(votes));
  begin = __shfl_sync(0xffffffffu, begin, leader);
  if (is_one) kept[begin + __popc(votes & ((1u << lane) - 1))] = candidate;
}
__device__ __forceinline__ void offer(const Best& best, uint64_t candidate) {
  append(best.kept, best.count, candidate >= *best.least, candidate);
}

// Drops all but the best `wanted`. The whole block, between two barriers of the caller's offers.
__device__ __forceinline__ void shrink(const Best& best, int32_t wanted) {
  __shared__ uint32_t bins[256];
  __shared__ int32_t found_bin, found_above, found_inside, kept_count;
  const auto thread = static_cast<int32_t>(threadIdx.x);
  const int32_t count = *best.count;
  if (count <= wanted) return;
  uint64_t prefix = 0, mask = 0;
  int32_t missing = wanted;
  for (int shift = 56; shift >= 0; shift -= 8) {
    for (int32_t i = thread; i < 256; i += kThreads) bins[i] = 0;
    __syncthreads();
    for (int32_t i = thread; i < count; i += kThreads) {
      const uint64_t candidate = best.kept[i];
      if ((candidate & mask) == prefix) atomicAdd(&bins[candidate >> shift & 255], 1u);
    }
    __syncthreads();
    if (thread < 32) {  // the bin of the last one wanted, from the highest down, eight bins a lane
      const int32_t top = 255 - 8 * thread;
      int32_t own = 0;
#pragma unroll
      for (int i = 0; i < 8; ++i) own += static_cast<int32_t>(bins[top - i]);
      int32_t until = own;
#pragma unroll
      for (int distance = 1; distance < 32; distance *= 2) {
        const int32_t lower = __shfl_up_sync(0xffffffffu, until, distance);
        if (thread >= distance) until += lower;
      }
      int32_t above = until - own;
      if (above < missing && missing <= until) {
        int32_t bin = top;
        while (above + static_cast<int32_t>(bins[bin]) < missing) above += static_cast<int32_t>(bins[bin--]);
        found_bin = bin, found_above = above, found_inside = static_cast<int32_t>(bins[bin]);
      }
    }
    if (thread == 0) kept_count = 0;
    __syncthreads();
    missing -= found_above;
    prefix |= static_cast<uint64_t>(found_bin) << shift;
    mask |= static_cast<uint64_t>(255) << shift;
    const bool is_all = found_inside == missing;
    __syncthreads();
    if (is_all) break;  // always at the last byte: candidates differ
  }
  // To the front, in steps: what a step writes lies before what the next one reads.
  for (int32_t base = 0; base < count; base += kThreads) {
    const uint64_t candidate = base + thread < count ? best.kept[base + thread] : 0;
    __syncthreads();
    append(best.kept, &kept_count, candidate != 0 && candidate >= prefix, candidate);
  }
  __syncthreads();
  if (thread == 0) *best.count = kept_count, *best.least = prefix == 0 ? 1 : prefix;
  __syncthreads();
}

// The first two indices of a key's row; is_there is false where a table names no page of the cache.
struct Place {
  int64_t first, second;
  bool is_there;
};
__device__ __forceinline__ Place place_of(const Arguments& a, int32_t batch, int32_t key) {
  if (a.tables == nullptr) return {batch, key, true};
  const int32_t page = a.tables[static_cast<int64_t>(batch) * a.table + key / a.page_size];
  return {page, key % a.page_size, page >= 0 && page < a.pages};
}

__device__ __forceinline__ int32_t* indices_of(const Arguments& a, int32_t batch, int32_t query) {
  return a.indices + (static_cast<int64_t>(batch) * a.queries + query) * a.top_k;
}
// The key that the query stands at.
__device__ __forceinline__ int32_t last_key_of(const Arguments& a, int32_t batch, int32_t query) {
  const int32_t keys = a.lengths == nullptr ? a.keys : min(max(a.lengths[batch], 0), a.keys);
  return query + keys - a.queries;
}
// Whether a query takes all keys that it sees, so that no score matters. Of pages some may be missing.
__device__ __forceinline__ bool takes_all(const Arguments& a, int32_t last_key) {
  return a.tables == nullptr && last_key < a.top_k;
}
__device__ __forceinline__ void write_all(const Arguments& a, int32_t batch, int32_t query, int32_t last_key) {
  int32_t* indices = indices_of(a, batch, query);
  for (auto i = static_cast<int32_t>(threadIdx.x); i < a.top_k; i += kThreads) indices[i] = i <= last_key ? i : -1;
}

// The kept ones by their keys. The whole block, behind a barrier.
__device__ __forceinline__ void write_sorted(const Arguments& a, const Best& best, int32_t batch, int32_t query) {
  const auto thread = static_cast<int32_t>(threadIdx.x);
  const int32_t count = *best.count;
  int32_t padded = 1;
  while (padded < count) padded *= 2;
  for (int32_t i = thread; i < padded; i += kThreads) {
    best.kept[i] = i < count ? static_cast<uint64_t>(key_of(best.kept[i])) : ~static_cast<uint64_t>(0);
  }
  __syncthreads();
  for (int32_t length = 2; length <= padded; length *= 2) {
    for (int32_t distance = length / 2; distance > 0; distance /= 2) {
      for (int32_t i = thread; i < padded / 2; i += kThreads) {
        const int32_t low = i / distance * 2 * distance + i % distance, high = low + distance;
        const uint64_t one = best.kept[low], other = best.kept[high];
        if ((one > other) == ((low & length) == 0)) best.kept[low] = other, best.kept[high] = one;
      }
      __syncthreads();
    }
  }
  int32_t* indices = indices_of(a, batch, query);
  for (int32_t i = thread; i < a.top_k; i += kThreads) {
    int32_t index = -1;
    if (i < count) {
      index = static_cast<int32_t>(best.kept[i]);
      const Place place = place_of(a, batch, index);
      if (a.tables != nullptr) index = static_cast<int32_t>(place.first * a.page_size + place.second);
    }
    indices[i] = index;
  }
}

}  // namespace kernel_pytorch::lightning_indexer
