// The second launch of the routing: every block adds up the blocks' counts of each expert, those before its own and
// all, and gives its pairs their rows in order. The last block writes what is about all tokens. sm_80.
#pragma once

#include "kernel_pytorch/cuda/ptx/memory.cuh"
#include "kernel_pytorch/cuda/tile/dependent_launch.cuh"
#include "kernel_pytorch/cuda/tile/reduce.cuh"
#include "kernel_pytorch/ops/moe_routing/cuda/arguments_cuda.h"

namespace kernel_pytorch::moe_routing {

// Of each expert, in shared memory.
struct Experts {
  int32_t* before;  // pairs of earlier blocks
  int32_t* all;
  int32_t* start;  // its first row
};

// Choices that are given may be experts of another device.
__device__ __forceinline__ bool is_here(const ForwardArguments& arguments, int32_t expert) {
  return expert >= 0 && expert < arguments.experts;
}

// Threads share the blocks of kWidth neighbouring experts, so that few reads wait for each other.
template <int kWidth>
__device__ __forceinline__ void add_counts(const ForwardArguments& arguments, int32_t block, const Experts& experts) {
  const int32_t thread = static_cast<int32_t>(threadIdx.x);
  const int32_t columns = arguments.experts / kWidth, parts = max(kThreads / columns, 1);
  for (int32_t e = thread; e < arguments.experts; e += kThreads) experts.before[e] = experts.all[e] = 0;
  __syncthreads();
  for (int32_t index = thread; index < columns * parts; index += kThreads) {
    const int32_t first = index % columns * kWidth;
    int32_t before[kWidth] = {}, all[kWidth] = {};
#pragma unroll 16
    for (int32_t other = index / columns; other < arguments.blocks; other += parts) {
      const int32_t* from = arguments.block_counts + int64_t{other} * arguments.experts + first;
      int32_t counts[kWidth];
      if constexpr (kWidth == 4) {
        const ptx::Word4 four = ptx::ld_global_v4(from);
        counts[0] = static_cast<int32_t>(four.x), counts[1] = static_cast<int32_t>(four.y);
        counts[2] = static_cast<int32_t>(four.z), counts[3] = static_cast<int32_t>(four.w);
      } else {
        counts[0] = *from;
      }
#pragma unroll
      for (int i = 0; i < kWidth; ++i) {
        all[i] += counts[i];
        if (other < block) before[i] += counts[i];
      }
    }
#pragma unroll
    for (int i = 0; i < kWidth; ++i) {
      atomicAdd(experts.before + first + i, before[i]);
      atomicAdd(experts.all + first + i, all[i]);
    }
  }
  __syncthreads();
}

__device__ __forceinline__ int32_t kept_of(const ForwardArguments& arguments, int32_t count) {
  return arguments.capacity == 0 ? count : min(count, arguments.capacity);
}

// By the first warp: a lane has neighbouring experts.
__device__ __forceinline__ void find_starts(const ForwardArguments& arguments, const Experts& experts) {
  const int32_t lane = static_cast<int32_t>(threadIdx.x), each = (arguments.experts + 31) / 32;
  const int32_t first = min(lane * each, arguments.experts), end = min(first + each, arguments.experts);
  int32_t own = 0;
  for (int32_t e = first; e < end; ++e) own += kept_of(arguments, experts.all[e]);
  int32_t sum = own;
#pragma unroll
  for (int distance = 1; distance < 32; distance *= 2) {
    const int32_t other = __shfl_up_sync(0xffffffffu, sum, distance);
    if (lane >= distance) sum += other;
  }
  int32_t next = sum - own;
  for (int32_t e = first; e < end; ++e) {
    experts.start[e] = next;
    next += kept_of(arguments, experts.all[e]);
  }
}

__device__ __forceinline__ void write_totals(const ForwardArguments& arguments, const Experts& experts) {
  __shared__ tile::BlockSum<kWarps, 2>::Storage storage;
  const int32_t thread = static_cast<int32_t>(threadIdx.x);
  int32_t dropped = 0;
  float aux = 0.0f, square = 0.0f;
  for (int32_t e = thread; e < arguments.experts; e += kThreads) {
    const int32_t count = experts.all[e], kept = kept_of(arguments, count);
    float share = 0.0f;
    const int32_t blocks = arguments.block_shares == nullptr ? 0 : arguments.blocks;
#pragma unroll 32
    for (int32_t block = 0; block < blocks; ++block) {
      share += arguments.block_shares[int64_t{block} * arguments.experts + e];
    }
    aux += static_cast<float>(count) * share;
    dropped += count - kept;
    arguments.counts[e] = count;
    arguments.offsets[e] = experts.start[e] + kept;
  }
  if (arguments.block_squares != nullptr) {
    for (int32_t block = thread; block < arguments.blocks; block += kThreads) square += arguments.block_squares[block];
  }
  dropped = __reduce_add_sync(0xffffffffu, dropped);
  __shared__ int32_t dropped_of[kWarps];
  if (thread % 32 == 0) dropped_of[thread / 32] = dropped;
  float sums[2] = {aux, square};
  tile::BlockSum<kWarps, 2>(storage).sum(sums);
  const int32_t last = arguments.experts - 1, end = experts.start[last] + kept_of(arguments, experts.all[last]);
  for (int32_t row = end + thread; row < arguments.tokens * arguments.k; row += kThreads) {
    arguments.token_of_row[row] = -1;
  }
  if (thread == 0) {
    const float tokens = static_cast<float>(max(arguments.tokens, 1));
    int32_t total = 0;
    for (int32_t i = 0; i < kWarps; ++i) total += dropped_of[i];
    *arguments.dropped = total;
    if (arguments.aux_loss == nullptr) return;
    *arguments.aux_loss =
        sums[0] / tokens * static_cast<float>(arguments.experts) / (tokens * static_cast<float>(arguments.k));
    *arguments.z_loss = sums[1] / tokens;
  }
}

// The block's pairs in order, 32 at a time of a warp, the warps' shares one after another.
__device__ __forceinline__ void write_rows(const ForwardArguments& arguments, const Experts& experts, int32_t* ranks) {
  const int32_t warp = static_cast<int32_t>(threadIdx.x / 32), lane = static_cast<int32_t>(threadIdx.x % 32);
  const int32_t first = static_cast<int32_t>(blockIdx.x) * arguments.block_tokens * arguments.k;
  const int32_t end = min(first + arguments.block_tokens * arguments.k, arguments.tokens * arguments.k);
  const int32_t each = (end - first + kThreads - 1) / kThreads * 32;
  const int32_t begin = min(first + warp * each, end), stop = min(begin + each, end);
  int32_t* own = ranks + warp * arguments.experts;
  for (int32_t i = static_cast<int32_t>(threadIdx.x); i < kWarps * arguments.experts; i += kThreads) ranks[i] = 0;
  __syncthreads();
  for (int32_t pair = begin + lane; pair < stop; pair += 32) {
    if (is_here(arguments, arguments.chosen[pair])) atomicAdd(own + arguments.chosen[pair], 1);
  }
  __syncthreads();
  for (int32_t e = static_cast<int32_t>(threadIdx.x); e < arguments.experts; e += kThreads) {
    int32_t next = experts.before[e];
    for (int32_t i = 0; i < kWarps; ++i) {
      const int32_t count = ranks[i * arguments.experts + e];
      ranks[i * arguments.experts + e] = next;
      next += count;
    }
  }
  __syncthreads();
  for (int32_t start = begin; start < stop; start += 32) {
    const int32_t pair = start + lane;
    const int32_t expert = pair < stop ? arguments.chosen[pair] : -1;
    const bool is_there = is_here(arguments, expert);
    const uint32_t alike = __match_any_sync(0xffffffffu, expert);
    const int32_t rank = is_there ? own[expert] + __popc(alike & ((1u << lane) - 1)) : 0;
    __syncwarp();
    if (is_there && __ffs(static_cast<int>(alike)) - 1 == lane) own[expert] += __popc(alike);
    __syncwarp();
    if (pair >= stop) continue;
    const bool is_kept = is_there && (arguments.capacity == 0 || rank < arguments.capacity);
    const int32_t row = is_kept ? experts.start[expert] + rank : -1;
    arguments.row_of_token[pair] = row;
    if (is_kept) {
      arguments.token_of_row[row] = pair / arguments.k;
    } else if (arguments.weights != nullptr) {
      arguments.weights[pair] = 0.0f;
    }
  }
}

// What the first launch leaves, of choices that are given.
__global__ void __launch_bounds__(kThreads, 1) count(const __grid_constant__ ForwardArguments arguments) {
  extern __shared__ __align__(16) int32_t memory[];
  for (int32_t e = static_cast<int32_t>(threadIdx.x); e < arguments.experts; e += kThreads) memory[e] = 0;
  __syncthreads();
  tile::follow_closely();
  const int32_t first = static_cast<int32_t>(blockIdx.x) * arguments.block_tokens * arguments.k;
  const int32_t end = min(first + arguments.block_tokens * arguments.k, arguments.tokens * arguments.k);
  for (int32_t pair = first + static_cast<int32_t>(threadIdx.x); pair < end; pair += kThreads) {
    const int32_t expert = arguments.chosen[pair];
    if (is_here(arguments, expert)) atomicAdd(memory + expert, 1);
  }
  __syncthreads();
  for (int32_t e = static_cast<int32_t>(threadIdx.x); e < arguments.experts; e += kThreads) {
    arguments.block_counts[int64_t{blockIdx.x} * arguments.experts + e] = memory[e];
  }
}

__global__ void __launch_bounds__(kThreads, 1) place(const __grid_constant__ ForwardArguments arguments) {
  extern __shared__ __align__(16) int32_t memory[];
  const Experts experts = {memory, memory + arguments.experts, memory + 2 * arguments.experts};
  tile::follow_closely();
  if (arguments.experts % 4 == 0) {
    add_counts<4>(arguments, static_cast<int32_t>(blockIdx.x), experts);
  } else {
    add_counts<1>(arguments, static_cast<int32_t>(blockIdx.x), experts);
  }
  if (threadIdx.x < 32) find_starts(arguments, experts);
  __syncthreads();
  if (static_cast<int32_t>(blockIdx.x) == arguments.blocks) {
    write_totals(arguments, experts);
  } else {
    write_rows(arguments, experts, memory + 3 * arguments.experts);
  }
}

}  // namespace kernel_pytorch::moe_routing
