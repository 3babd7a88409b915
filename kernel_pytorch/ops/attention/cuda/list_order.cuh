// In which order the tiles of block lists are taken: what is much longer than the others first, what is much shorter
// last, so that the machine does not end with one list that began late. Those between stay as they come, since
// neighbours read the same keys and values from L2. A block sorts a section by counting, the same way every time.
#pragma once

#include "kernel_pytorch/cuda/tile/dependent_launch.cuh"
#include "kernel_pytorch/ops/attention/cuda/arguments_cuda.h"

namespace kernel_pytorch::attention {

inline constexpr int kListOrderThreads = 1024;
inline constexpr int kListClasses = 5;

__device__ __forceinline__ int32_t blocks_listed(const BlockIndex& index, int64_t batch, int64_t head, int64_t row) {
  if (index.counts == nullptr) return 0;
  return index.counts[batch * index.counts_batch + head * index.counts_head + row * index.counts_row];
}

// The cap of list_length, which adds up all heads of a unit: with it the sum over all places stays below 2^31.
inline constexpr int32_t kLongestList = 32767;
__device__ __forceinline__ int32_t list_length(const ListOrderArguments& arguments, int32_t unit, int32_t tile) {
  const int32_t units = arguments.heads / arguments.group, batch = unit / units, row = tile / arguments.row_tiles;
  const int32_t first = (unit - batch * units) * arguments.group;
  int32_t length = 0;
  for (int32_t head = first; head < first + arguments.group; ++head) {
    length += blocks_listed(arguments.lists.partial, batch, head, row) +
              blocks_listed(arguments.lists.full, batch, head, row);
  }
  return least(length, kLongestList);
}

// By how a length compares with the mean, total / count.
__device__ __forceinline__ int list_class(int32_t length, int64_t count, int64_t total) {
  const int64_t twice = 2 * length * count;
  return twice > 8 * total ? 0 : twice > 4 * total ? 1 : twice > 3 * total ? 2 : twice >= total ? 3 : 4;
}

// Sums of the threads before this one, and of all; every thread of the block calls.
struct BlockSum {
  int32_t before, total;
};
__device__ __forceinline__ BlockSum block_sum(int32_t value, int32_t (&sums)[32]) {
  const int lane = static_cast<int>(threadIdx.x % 32), warp = static_cast<int>(threadIdx.x / 32);
  const auto scan = [&](int32_t sum) {
    for (int distance = 1; distance < 32; distance *= 2) {
      const int32_t other = __shfl_up_sync(0xffffffffu, sum, distance);
      sum += lane >= distance ? other : 0;
    }
    return sum;
  };
  const int32_t sum = scan(value);
  __syncthreads();  // the sums of a call before this one have been read
  if (lane == 31) sums[warp] = sum;
  __syncthreads();
  const int32_t all = scan(sums[lane]);
  const int32_t before = warp == 0 ? 0 : __shfl_sync(0xffffffffu, all, warp - 1);
  return {before + sum - value, __shfl_sync(0xffffffffu, all, 31)};
}

// A thread takes places side by side.
__global__ void __launch_bounds__(kListOrderThreads, 1)
    order_lists(const __grid_constant__ ListOrderArguments arguments) {
  tile::follow_closely();
  __shared__ int32_t sums[32];
  const int32_t first_unit = static_cast<int32_t>(blockIdx.x) * arguments.section_units;
  const int32_t base = first_unit * arguments.tiles;
  const int32_t count = least(arguments.section_units, arguments.units - first_unit) * arguments.tiles;
  const int32_t share = (count + kListOrderThreads - 1) / kListOrderThreads;
  const int32_t begin = least(count, static_cast<int32_t>(threadIdx.x) * share), end = least(count, begin + share);
  int32_t own = 0, unit = (base + begin) / arguments.tiles, tile = base + begin - unit * arguments.tiles;
  constexpr int kTogether = 4;  // reads on their way at once
#pragma unroll 1
  for (int32_t i = begin; i < end; i += kTogether) {
    int32_t lengths[kTogether];
#pragma unroll
    for (int j = 0; j < kTogether; ++j) {
      lengths[j] = i + j < end ? list_length(arguments, unit, tile) : 0;
      if (++tile == arguments.tiles) tile = 0, ++unit;
    }
#pragma unroll
    for (int j = 0; j < kTogether; ++j) {
      if (i + j < end) arguments.lengths[base + i + j] = lengths[j];
      own += lengths[j];
    }
  }
  const int64_t total = block_sum(own, sums).total;
  int32_t places[kListClasses] = {};
#pragma unroll 4
  for (int32_t i = begin; i < end; ++i) {
    const int is = list_class(arguments.lengths[base + i], count, total);
#pragma unroll
    for (int j = 0; j < kListClasses; ++j) places[j] += is == j;
  }
  int32_t before = 0;
#pragma unroll
  for (int j = 0; j < kListClasses; ++j) {
    const BlockSum sum = block_sum(places[j], sums);
    places[j] = before + sum.before;
    before += sum.total;
  }
#pragma unroll 4
  for (int32_t i = begin; i < end; ++i) {
    const int is = list_class(arguments.lengths[base + i], count, total);
    int32_t place = 0;
#pragma unroll
    for (int j = 0; j < kListClasses; ++j) {
      if (is == j) place = places[j]++;
    }
    arguments.order[base + place] = base + i;
  }
}

}  // namespace kernel_pytorch::attention
