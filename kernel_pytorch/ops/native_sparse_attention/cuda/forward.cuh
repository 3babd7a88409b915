// Forward: a block of threads has one token of one key head, with the group's heads together. A branch goes by chunks
// of keys: a thread scores one key for every head, a warp keeps most and mass of a head, threads add columns of values.
// Where blocks are chosen, the compressed scores are computed again, now that their sum is known, and gather in a score
// for each block; the best are taken one after the other.
#pragma once

#include "kernel_pytorch/ops/native_sparse_attention/cuda/common.cuh"

namespace kernel_pytorch::native_sparse_attention {

struct ForwardMemory {
  float *query, *total, *sums, *scores, *most, *mass, *factor, *importance, *block_scores;
  int32_t *rows, *list;

  __device__ __forceinline__ ForwardMemory(const Arguments& a, float* shared) {
    query = shared;
    total = query + a.group * a.size;
    sums = total + a.group * a.value_size;
    scores = sums + a.group * a.value_size;
    most = scores + a.group * kChunk;
    mass = most + a.group;
    factor = mass + a.group;
    importance = factor + a.group;
    rows = reinterpret_cast<int32_t*>(importance + kChunk);
    list = rows + kChunk;
    block_scores = reinterpret_cast<float*>(list + a.list_length);
  }
};

// One branch: total += gate * softmax(scores) values.
template <class T, class C, class Seen>
__device__ __forceinline__ void attend(const Arguments& a, const ForwardMemory& memory, const Group& at,
                                       const Rows& keys, const Rows& values, const Seen& seen, int branch) {
  const auto thread = static_cast<int32_t>(threadIdx.x), warp = thread / 32, lane = thread % 32;
  for (int32_t i = thread; i < a.group * a.value_size; i += kThreads) memory.sums[i] = 0;
  for (int32_t h = thread; h < a.group; h += kThreads) memory.most[h] = nothing(), memory.mass[h] = 0;
  __syncthreads();
  for (int32_t base = 0; base < seen.count; base += kChunk) {
    const int32_t row = base + thread < seen.count ? seen.row(base + thread) : -1;
    memory.rows[thread] = row;
    dot_row<C>(a, memory.query, a.size, row < 0 ? nullptr : row_at<C>(keys, at.batch, row, at.key_head), nothing(),
               memory.scores);
    __syncthreads();
    for (int32_t h = warp; h < a.group; h += kThreads / 32) {
      float* scores = memory.scores + h * kChunk;
      float most = memory.most[h];
#pragma unroll
      for (int k = 0; k < kChunk; k += 32) most = fmaxf(most, scores[k + lane]);
#pragma unroll
      for (int distance = 16; distance > 0; distance /= 2) {
        most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, distance));
      }
      float sum = 0;
#pragma unroll
      for (int k = 0; k < kChunk; k += 32) {
        const float score = scores[k + lane];
        const float power = score == nothing() ? 0.0f : expf(score - most);
        scores[k + lane] = power;
        sum += power;
      }
      sum = tile::sum_lanes<32>(sum);
      if (lane == 0) {
        const float factor = memory.most[h] == nothing() ? 0.0f : expf(memory.most[h] - most);
        memory.most[h] = most;
        memory.mass[h] = memory.mass[h] * factor + sum;
        memory.factor[h] = factor;
      }
    }
    __syncthreads();
    const int32_t count = min(kChunk, seen.count - base);
    for (int32_t i = thread; i < a.group * a.value_size; i += kThreads) {
      const int32_t h = i / a.value_size, column = i % a.value_size;
      float sum = memory.sums[i] * memory.factor[h];
#pragma unroll 2
      for (int32_t k = 0; k < count; ++k) {
        if (memory.rows[k] < 0) continue;
        sum += memory.scores[h * kChunk + k] *
               tile::to_float(row_at<C>(values, at.batch, memory.rows[k], at.key_head)[column]);
      }
      memory.sums[i] = sum;
    }
    __syncthreads();
  }
  const bool has_gate = a.gates[branch].data != nullptr;
  for (int32_t i = thread; has_gate && i < a.group * a.value_size; i += kThreads) {
    const int32_t h = i / a.value_size;
    if (memory.most[h] == nothing()) continue;  // it saw no key
    const float gate = gate_at<T>(a.gates[branch], at.batch, at.token, at.key_head * a.group + h);
    memory.total[i] += gate * (memory.sums[i] / memory.mass[h]);
  }
  for (int32_t h = thread; has_gate && a.lse[branch] != nullptr && h < a.group; h += kThreads) {
    const int64_t head = static_cast<int64_t>(at.batch) * a.heads + at.key_head * a.group + h;
    a.lse[branch][head * a.queries + at.token] =
        memory.most[h] == nothing() ? nothing() : memory.most[h] + logf(memory.mass[h]);
  }
  __syncthreads();
}

// Scores of blocks, of the compressed branch's most and mass.
template <class C>
__device__ __forceinline__ void score_blocks(const Arguments& a, const ForwardMemory& memory, const Group& at,
                                             const Range& seen) {
  const auto thread = static_cast<int32_t>(threadIdx.x);
  const int32_t spans = a.compress_block / a.compress_stride, strides = a.block_size / a.compress_stride;
  for (int32_t i = thread; i < a.key_blocks; i += kThreads) memory.block_scores[i] = 0;
  for (int32_t base = 0; base < seen.count; base += kChunk) {
    const int32_t row = base + thread < seen.count ? seen.row(base + thread) : -1;
    dot_row<C>(a, memory.query, a.size, row < 0 ? nullptr : row_at<C>(a.compressed_key, at.batch, row, at.key_head),
               nothing(), memory.scores);
    float sum = 0;  // of this thread's own scores
    for (int32_t h = 0; row >= 0 && h < a.group; ++h) {
      sum += expf(memory.scores[h * kChunk + thread] - memory.most[h]) / memory.mass[h];
    }
    memory.importance[thread] = sum;
    __syncthreads();
    const int32_t last = min(base + kChunk, seen.count) - 1;  // of the chunk
    const int32_t last_block = min((last + spans - 1) / strides, a.key_blocks - 1);
    for (int32_t block = base / strides + thread; block <= last_block; block += kThreads) {
      const int32_t begin = block * strides, end = begin + strides;
      float score = memory.block_scores[block];
      for (int32_t c = max(base, begin - spans + 1); c <= min(last, end - 1); ++c) {
        const int32_t shared_strides = min(c + spans, end) - max(c, begin);
        score += static_cast<float>(shared_strides) * memory.importance[c - base];
      }
      memory.block_scores[block] = score;
    }
    __syncthreads();
  }
}

// Whether block `a` goes before block `b`.
__device__ __forceinline__ bool goes_first(float a_score, int32_t a, float b_score, int32_t b) {
  const bool a_is_nan = a_score != a_score, b_is_nan = b_score != b_score;
  if (a_is_nan != b_is_nan) return b_is_nan;
  return !a_is_nan && a_score != b_score ? a_score > b_score : a < b;
}

// list: ascending, -1 behind the last. The scores become -inf where a block is taken.
__device__ __forceinline__ void choose(const Arguments& a, const ForwardMemory& memory, int32_t place) {
  __shared__ float best_scores[kThreads / 32];
  __shared__ int32_t best_blocks[kThreads / 32];
  const auto thread = static_cast<int32_t>(threadIdx.x);
  const int32_t candidates = place / a.block_size + 1, wanted = min(candidates, a.list_length);
  const int32_t local_begin = max(candidates - a.local_blocks, 0);
  const int32_t local = min(candidates - local_begin, wanted);
  const int32_t first = min(min(a.first_blocks, local_begin), wanted - local);
  const int32_t scored_begin = min(a.first_blocks, local_begin);
  for (int32_t taken = local + first; taken < wanted; ++taken) {
    float score = 0;
    int32_t block = -1;
    for (int32_t i = scored_begin + thread; i < local_begin; i += kThreads) {
      const float own = memory.block_scores[i];
      if (own < 0) continue;  // taken
      if (block < 0 || goes_first(own, i, score, block)) score = own, block = i;
    }
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) {
      const float other_score = __shfl_xor_sync(0xffffffffu, score, distance);
      const int32_t other = __shfl_xor_sync(0xffffffffu, block, distance);
      if (other >= 0 && (block < 0 || goes_first(other_score, other, score, block))) {
        score = other_score, block = other;
      }
    }
    if (thread % 32 == 0) best_scores[thread / 32] = score, best_blocks[thread / 32] = block;
    __syncthreads();
    if (thread == 0) {
      for (int k = 1; k < kThreads / 32; ++k) {
        const int32_t other = best_blocks[k];
        if (other >= 0 && (block < 0 || goes_first(best_scores[k], other, score, block))) {
          score = best_scores[k], block = other;
        }
      }
      memory.block_scores[block] = nothing();  // scores of others are never negative
    }
    __syncthreads();
  }
  // Ascending: a warp walks over the blocks and appends those that are taken.
  if (thread < 32) {
    int32_t count = 0;
    for (int32_t base = 0; base < candidates; base += 32) {
      const int32_t block = base + thread;
      const bool is_scored = block >= scored_begin && block < local_begin;
      const bool is_taken = block < candidates && (block >= candidates - local || block < first ||
                                                   (is_scored && memory.block_scores[block] == nothing()));
      const uint32_t votes = __ballot_sync(0xffffffffu, is_taken);
      if (is_taken) memory.list[count + __popc(votes & ((1u << thread) - 1))] = block;
      count += __popc(votes);
    }
    for (int32_t i = count + thread; i < a.list_length; i += 32) memory.list[i] = -1;
  }
  __syncthreads();
}

template <class T, class C>
__global__ void __launch_bounds__(kThreads, kBlocks) forward(const __grid_constant__ Arguments a) {
  extern __shared__ float shared[];
  const ForwardMemory memory(a, shared);
  const Group at(a);
  const Place place = place_of(a, at.token);
  const auto thread = static_cast<int32_t>(threadIdx.x);
  load_heads<T>(a, a.query, at, a.size, a.scale, memory.query);
  for (int32_t i = thread; i < a.group * a.value_size; i += kThreads) memory.total[i] = 0;
  const int64_t list_at = (static_cast<int64_t>(at.batch) * a.queries + at.token) * a.key_heads + at.key_head;
  for (int32_t i = thread; i < a.list_length; i += kThreads) {
    memory.list[i] = a.lists == nullptr ? -1 : a.lists[list_at * a.list_length + i];
  }
  __syncthreads();
  if (place.place >= 0) {
    if (a.chooses || a.gates[0].data != nullptr) {
      const Range seen{place.compressed_begin, compressed_before(a, place.place + 1)};
      attend<T, C>(a, memory, at, a.compressed_key, a.compressed_value, seen, 0);
      if (a.chooses) {
        score_blocks<C>(a, memory, at, seen);
        choose(a, memory, place.place);
      }
    }
    if (a.gates[1].data != nullptr) {
      const Listed seen{memory.list, a.block_size, place.place, place.key_begin, a.list_length * a.block_size};
      attend<T, T>(a, memory, at, a.key, a.value, seen, 1);
    }
    if (a.gates[2].data != nullptr) {
      const int32_t first = max(place.place - a.window + 1, 0);
      attend<T, T>(a, memory, at, a.key, a.value, Range{place.key_begin + first, place.place + 1 - first}, 2);
    }
  }
  for (int branch = 0; branch < kBranches; ++branch) {
    if (a.lse[branch] == nullptr || (place.place >= 0 && a.gates[branch].data != nullptr)) continue;
    for (int32_t h = thread; h < a.group; h += kThreads) {
      const int64_t head = static_cast<int64_t>(at.batch) * a.heads + at.key_head * a.group + h;
      a.lse[branch][head * a.queries + at.token] = nothing();
    }
  }
  for (int32_t i = thread; a.selected != nullptr && i < a.selected_length; i += kThreads) {
    a.selected[list_at * a.selected_length + i] = a.chooses ? memory.list[i] : -1;
  }
  for (int32_t i = thread; i < a.group * a.value_size; i += kThreads) {
    T* row = result_at<T>(a.output, at.batch, at.token, at.key_head * a.group + i / a.value_size);
    row[i % a.value_size] = tile::from_float<T>(memory.total[i]);
  }
}

}  // namespace kernel_pytorch::native_sparse_attention
