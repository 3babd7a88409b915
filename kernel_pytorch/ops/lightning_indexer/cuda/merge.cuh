// The best of what the splits of a query's keys kept: a block of threads for each query.
#pragma once

#include "kernel_pytorch/ops/lightning_indexer/cuda/choose.cuh"

namespace kernel_pytorch::lightning_indexer {

// At least four blocks of a multiprocessor: left to itself the assembler spills at 32 registers.
__global__ void __launch_bounds__(kThreads, 4) merge(const __grid_constant__ Arguments a) {
  extern __shared__ __align__(16) char shared[];
  __shared__ State state;
  const auto thread = static_cast<int32_t>(threadIdx.x);
  auto* kept =
      a.kept != nullptr ? a.kept + static_cast<int64_t>(blockIdx.x) * a.capacity : reinterpret_cast<uint64_t*>(shared);
  const Best best = best_of(a, state, kept, 0);
  for (int64_t item = blockIdx.x; item < static_cast<int64_t>(a.batch) * a.queries; item += gridDim.x) {
    const auto batch = static_cast<int32_t>(item / a.queries), query = static_cast<int32_t>(item % a.queries);
    const int32_t last_key = last_key_of(a, batch, query);
    if (takes_all(a, last_key)) {
      write_all(a, batch, query, last_key);
      continue;
    }
    __syncthreads();
    if (thread == 0) state.counts[0] = 0, state.least[0] = 1;
    __syncthreads();
    const int64_t count = static_cast<int64_t>(a.splits) * a.split_wanted;
    for (int64_t base = 0; base < count; base += kThreads) {
      if (*best.count > a.capacity - kThreads) shrink(best, a.wanted);
      __syncthreads();
      offer(best, base + thread < count ? a.partial[item * count + base + thread] : 0);
      __syncthreads();
    }
    shrink(best, a.wanted);
    write_sorted(a, best, batch, query);
  }
}

}  // namespace kernel_pytorch::lightning_indexer
