// The choice of blocks on mma: once the compressed branch's sums are known, its scores are computed again, and each
// step's probabilities, summed over the heads of a token, gather in scores of blocks in shared memory; then a warp for
// each token takes the best. sm_80.
#pragma once

#include "kernel_pytorch/ops/native_sparse_attention/cuda_mma/tile.cuh"

namespace kernel_pytorch::native_sparse_attention {

// Sums over the eight rows of lanes `distance` apart: each exchange leaves half of the kUsed columns with each lane.
template <int kUsed, int kCount>
__device__ __forceinline__ void fold_rows(float (&values)[kCount], int32_t lane, int distance) {
  const bool is_high = (lane & distance) != 0;
#pragma unroll
  for (int i = 0; i < kUsed / 2; ++i) {
    const float kept = is_high ? values[kUsed / 2 + i] : values[i];
    const float given = is_high ? values[i] : values[kUsed / 2 + i];
    values[i] = kept + __shfl_xor_sync(0xffffffffu, given, distance);
  }
}

// Probabilities of a step to importance[slot][column].
template <class Tile>
__device__ __forceinline__ void sum_heads(const Tile& tile, const float (&values)[kMmaKeys / 2], int first_row,
                                          int32_t shift) {
  if (shift == kMostShift) {
    float sums[16];
#pragma unroll
    for (int i = 0; i < 16; ++i) sums[i] = values[i / 2 * 4 + i % 2] + values[i / 2 * 4 + 2 + i % 2];
    fold_rows<16>(sums, tile.lane, 16);
    fold_rows<8>(sums, tile.lane, 8);
    fold_rows<4>(sums, tile.lane, 4);
    const int32_t group = (tile.lane / 16 & 1) * 4 + (tile.lane / 8 & 1) * 2 + (tile.lane / 4 & 1);
    float* to = tile.importance + tile.slot(first_row) * kMmaKeys + group * 8 + tile.lane % 4 * 2;
    to[0] = sums[0], to[1] = sums[1];
    return;
  }
  const int32_t rows = 1 << shift;  // 1 to 8
#pragma unroll
  for (int i = 0; i < kMmaKeys / 2; ++i) {
    float sum = values[i];
    for (int32_t distance = 1; distance < rows; distance *= 2) sum += __shfl_xor_sync(0xffffffffu, sum, 4 * distance);
    if (tile.lane / 4 % rows == 0) {
      tile.importance[tile.slot(first_row + i / 2 % 2) * kMmaKeys + tile::fragment_column(tile.lane, i)] = sum;
    }
  }
}

// Adds a step's importance to the scores of blocks. The whole block of threads, between barriers.
template <class Tile>
__device__ __forceinline__ void add_importance(const Arguments& a, const Tile& tile, const KeyStep& step) {
  const int32_t spans = a.compress_block / a.compress_stride, strides = a.block_size / a.compress_stride;
  const int32_t most = (kMmaKeys + spans - 2) / strides + 2;  // blocks that a step reaches
  for (auto i = static_cast<int32_t>(threadIdx.x); i < tile.tokens * most; i += kMmaThreads) {
    const int32_t slot = i / most;
    const Place place = tile.places[slot];
    if (place.place < 0) continue;
    const int32_t base = step.first - place.compressed_begin;
    const int32_t first = max(base, 0), end = min(base + step.rows, compressed_before(a, place.place + 1));
    const int32_t block = first / strides + i % most;
    if (first >= end || block > min((end + spans - 2) / strides, a.key_blocks - 1)) continue;
    const int32_t begin_stride = block * strides, end_stride = begin_stride + strides;
    float& to = tile.block_scores[slot * a.key_blocks + block];
    float score = to;
    for (int32_t c = max(first, begin_stride - spans + 1); c < min(end, end_stride); ++c) {
      const int32_t shared_strides = min(c + spans, end_stride) - max(c, begin_stride);
      score += static_cast<float>(shared_strides) * tile.importance[slot * kMmaKeys + c - base];
    }
    to = score;
  }
}

// Scores as integers that order alike, NaN (below all others) as 1 and what is taken as 0.
__device__ __forceinline__ uint32_t order_of(float score) {
  return score < 0 ? 0u : score != score ? 1u : __float_as_uint(score) + 2u;
}

// The list of a token, by one warp: ascending, -1 behind the last. Scores become -inf where a block is taken.
template <class Tile>
__device__ __forceinline__ void choose_list(const Arguments& a, const Tile& tile, int32_t slot) {
  constexpr uint32_t kAll = 0xffffffffu;
  const int32_t place = tile.places[slot].place, lane = tile.lane;
  int32_t* list = tile.lists + slot * a.list_length;
  float* scores = tile.block_scores + slot * a.key_blocks;
  const int32_t candidates = place < 0 ? 0 : place / a.block_size + 1, wanted = min(candidates, a.list_length);
  const int32_t local_begin = max(candidates - a.local_blocks, 0);
  const int32_t local = min(candidates - local_begin, wanted);
  const int32_t scored_begin = min(a.first_blocks, local_begin);
  const int32_t first = min(scored_begin, wanted - local);
  uint32_t best = 0;
  int32_t best_block = 0;
  const auto search = [&] {
    best = 0;
    for (int32_t i = scored_begin + lane; i < local_begin; i += 32) {
      const uint32_t own = order_of(scores[i]);
      if (own > best) best = own, best_block = i;
    }
  };
  if (local + first < wanted) search();
  for (int32_t taken = local + first; taken < wanted; ++taken) {
    const uint32_t most = __reduce_max_sync(kAll, best);
    const auto block =
        static_cast<int32_t>(__reduce_min_sync(kAll, best == most ? static_cast<uint32_t>(best_block) : 0x7fffffffu));
    if (best == most && best_block == block) {
      scores[block] = tile::minus_infinity();
      search();
    }
    __syncwarp();
  }
  int32_t count = 0;
  for (int32_t base = 0; base < candidates; base += 32) {
    const int32_t block = base + lane;
    const bool is_scored = block >= scored_begin && block < local_begin;
    const bool is_taken = block < candidates && (block >= candidates - local || block < first ||
                                                 (is_scored && scores[block] == tile::minus_infinity()));
    const uint32_t votes = __ballot_sync(kAll, is_taken);
    if (is_taken) list[count + __popc(votes & ((1u << lane) - 1))] = block;
    count += __popc(votes);
  }
  for (int32_t i = count + lane; i < a.list_length; i += 32) list[i] = -1;
}

}  // namespace kernel_pytorch::native_sparse_attention
