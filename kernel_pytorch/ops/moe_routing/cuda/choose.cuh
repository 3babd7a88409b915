// The first launch of the routing: a warp per token finds its k best experts, and a block leaves how many of its pairs
// chose each expert. sm_80.
#pragma once

#include "kernel_pytorch/cuda/tile/dependent_launch.cuh"
#include "kernel_pytorch/ops/moe_routing/cuda/row.cuh"

namespace kernel_pytorch::moe_routing {

// Floats as unsigned integers of the same order. 0 is less than all of them but NaN.
__device__ __forceinline__ uint32_t ordered(float value) {
  const uint32_t bits = __float_as_uint(value);
  return bits ^ (static_cast<uint32_t>(static_cast<int32_t>(bits) >> 31) | 0x80000000u);
}
// The same, NaN as the lowest float.
__device__ __forceinline__ uint32_t key_of(float value) {
  return ordered(value == value ? value : tile::minus_infinity());
}

// The lane's lowest index of its largest key.
template <int kPer>
struct Best {
  uint32_t key;
  int32_t at;
  explicit __device__ __forceinline__ Best(const uint32_t (&keys)[kPer]) : key(keys[0]), at(0) {
#pragma unroll
    for (int i = 1; i < kPer; ++i) {
      if (keys[i] > key) key = keys[i], at = i;
    }
  }
};

// The groups that may be chosen from, one bit each. `memory`: the warp's own, a float per expert.
template <int kPer>
__device__ __forceinline__ uint32_t choose_groups(const ForwardArguments& arguments, const float (&quality)[kPer],
                                                  float* memory) {
  const int32_t lane = static_cast<int32_t>(threadIdx.x % 32), each = arguments.experts / arguments.groups;
  __syncwarp();
#pragma unroll
  for (int i = 0; i < kPer; ++i) {
    if (32 * i + lane < arguments.experts) memory[32 * i + lane] = quality[i];
  }
  __syncwarp();
  uint32_t key = 0;
  if (lane < arguments.groups) {
    float best = tile::minus_infinity(), second = tile::minus_infinity();
    for (int32_t e = lane * each; e < (lane + 1) * each; ++e) {
      const float value = memory[e];
      second = fmaxf(second, fminf(best, value));
      best = fmaxf(best, value);
    }
    key = key_of(arguments.group_top == 2 && each > 1 ? best + second : best);
  }
  uint32_t kept = 0;
  for (int32_t i = 0; i < arguments.group_k; ++i) {
    const uint32_t most = __reduce_max_sync(0xffffffffu, key);
    const int32_t group = __ffs(static_cast<int>(__ballot_sync(0xffffffffu, key == most))) - 1;
    kept |= 1u << group;
    if (lane == group) key = 0;
  }
  return kept;
}

// Lane j's: the expert of rank j among the chosen, and its score.
struct Choice {
  int32_t expert = 0;
  float score = 0.0f;
};

// k searches for the largest key.
template <int kPer>
__device__ __forceinline__ Choice search(uint32_t (&keys)[kPer], const float (&scores)[kPer], int32_t k) {
  const int32_t lane = static_cast<int32_t>(threadIdx.x % 32);
  Choice choice;
  for (int32_t j = 0; j < k; ++j) {
    const Best<kPer> best(keys);
    const uint32_t most = __reduce_max_sync(0xffffffffu, best.key);
    const uint32_t candidate = best.key == most ? static_cast<uint32_t>(32 * best.at + lane) : 0xffffffffu;
    const int32_t expert = static_cast<int32_t>(__reduce_min_sync(0xffffffffu, candidate));
    float score = 0.0f;
#pragma unroll
    for (int i = 0; i < kPer; ++i) {
      if (32 * i + lane == expert) {
        keys[i] = 0;
        score = scores[i];
      }
    }
    score = __shfl_sync(0xffffffffu, score, expert % 32);
    if (lane == j) choice = {expert, score};
  }
  return choice;
}

// A key of which at least k are as large: the k-th largest of the lanes' largest, or less where some are equal. 0:
// there is none.
template <int kPer>
__device__ __forceinline__ uint32_t bound_of(const uint32_t (&keys)[kPer], int32_t k) {
  uint32_t largest = keys[0];
#pragma unroll
  for (int i = 1; i < kPer; ++i) largest = max(largest, keys[i]);
  uint32_t bound = 0;
#pragma unroll 4
  for (int32_t i = 0; i < k; ++i) {
    bound = __reduce_max_sync(0xffffffffu, largest);
    if (largest == bound) largest = 0;
  }
  return bound;
}

// The same choice as `search`, in a third of the instructions where few experts are as good as the k-th best lane's
// best: those are collected, and each is ranked against all. `packed` and `values` are the warp's own.
template <int kPer>
__device__ __forceinline__ Choice choose_best(uint32_t (&keys)[kPer], const float (&scores)[kPer], int32_t k,
                                              uint64_t* packed, float* values) {
  const int32_t lane = static_cast<int32_t>(threadIdx.x % 32);
  const uint32_t bound = bound_of(keys, k);
  int32_t own = 0;
#pragma unroll
  for (int i = 0; i < kPer; ++i) own += keys[i] >= bound ? 1 : 0;
  int32_t end = own;
#pragma unroll
  for (int distance = 1; distance < 32; distance *= 2) {
    const int32_t other = __shfl_up_sync(0xffffffffu, end, distance);
    if (lane >= distance) end += other;
  }
  const int32_t count = __shfl_sync(0xffffffffu, end, 31);
  if (bound == 0 || count > kCandidates) return search(keys, scores, k);
  int32_t at = end - own;
#pragma unroll
  for (int i = 0; i < kPer; ++i) {
    if (keys[i] >= bound) {  // of equal keys the lower index is the larger word
      packed[at] = uint64_t{keys[i]} << 32 | (0xffffffffu - static_cast<uint32_t>(32 * i + lane));
      values[at] = scores[i];
      ++at;
    }
  }
  __syncwarp();
  const bool is_one = lane < count;
  const uint64_t word = is_one ? packed[lane] : 0;
  const float value = is_one ? values[lane] : 0.0f;
  int32_t rank = 0;
#pragma unroll 4
  for (int32_t i = 0; i < count; ++i) rank += packed[i] > word ? 1 : 0;
  __syncwarp();
  if (is_one && rank < k) {
    packed[rank] = 0xffffffffu - static_cast<uint32_t>(word);
    values[rank] = value;
  }
  __syncwarp();
  Choice choice;
  if (lane < k) choice = {static_cast<int32_t>(packed[lane]), values[lane]};
  __syncwarp();
  return choice;
}

template <class T, int kPer>
__global__ void __launch_bounds__(choose_threads(kPer), 1) choose(const __grid_constant__ ForwardArguments arguments) {
  constexpr int kThreads = choose_threads(kPer), kWarps = kThreads / 32;
  extern __shared__ __align__(16) unsigned char memory[];
  const int32_t warp = static_cast<int32_t>(threadIdx.x / 32), lane = static_cast<int32_t>(threadIdx.x % 32);
  uint64_t* packed = reinterpret_cast<uint64_t*>(memory);
  float* values = reinterpret_cast<float*>(packed + kWarps * kCandidates);
  int32_t* counts = reinterpret_cast<int32_t*>(values + kWarps * kCandidates);
  float* of_warps = reinterpret_cast<float*>(counts + arguments.experts);
  float* squares = of_warps + kWarps * arguments.experts;
  float* of_warp = of_warps + warp * arguments.experts;
  packed += warp * kCandidates, values += warp * kCandidates;
  for (int32_t e = static_cast<int32_t>(threadIdx.x); e < arguments.experts; e += kThreads) counts[e] = 0;
  __syncthreads();
  tile::follow_closely();
  const int32_t first = static_cast<int32_t>(blockIdx.x) * arguments.block_tokens;
  const int32_t end = min(first + arguments.block_tokens, arguments.tokens);
  float share_sums[kPer] = {}, ahead[kPer];
  float square = 0.0f;
  const auto bias_at = [&](int i) {  // not kept in registers, which are scarce
    const bool is_there = arguments.bias != nullptr && 32 * i + lane < arguments.experts;
    return is_there ? __ldg(arguments.bias + 32 * i + lane) : 0.0f;
  };
  int32_t token = first + warp;
  if (token < end) load_logits<T>(arguments.logits, token * arguments.row_stride, arguments.experts, ahead);
  for (; token < end; token += kWarps) {
    float logits[kPer];
#pragma unroll
    for (int i = 0; i < kPer; ++i) logits[i] = ahead[i];
    if (token + kWarps < end) {  // the next token's, while this one is chosen for
      load_logits<T>(arguments.logits, (token + kWarps) * arguments.row_stride, arguments.experts, ahead);
    }
    Row<kPer> row;
    row.compute(logits, arguments.is_sigmoid);
    square += row.lse * row.lse;
    const float share = arguments.is_sigmoid ? 1.0f / row.total : 1.0f;
    uint32_t keys[kPer];
#pragma unroll
    for (int i = 0; i < kPer; ++i) share_sums[i] += row.scores[i] * share;
    // Logits behind the last expert are -infinity, and of equal keys the lower index is chosen: never one of those. A
    // NaN shows in the sum.
    if (arguments.bias == nullptr && row.sum == row.sum) {
#pragma unroll
      for (int i = 0; i < kPer; ++i) keys[i] = ordered(logits[i]);
    } else {
#pragma unroll
      for (int i = 0; i < kPer; ++i) {
        const bool is_there = 32 * i + lane < arguments.experts;
        keys[i] = is_there ? key_of(arguments.bias == nullptr ? logits[i] : row.scores[i] + bias_at(i)) : 0;
      }
    }
    if (arguments.groups > 1) {
      float quality[kPer];
#pragma unroll
      for (int i = 0; i < kPer; ++i) {
        quality[i] = row.scores[i] + bias_at(i);
        if (quality[i] != quality[i]) quality[i] = tile::minus_infinity();
      }
      const uint32_t kept = choose_groups(arguments, quality, of_warp);
      const int32_t each = arguments.experts / arguments.groups;
#pragma unroll
      for (int i = 0; i < kPer; ++i) {
        const int32_t expert = 32 * i + lane;
        if (expert < arguments.experts && (kept >> expert / each & 1) == 0) keys[i] = 0;
      }
    }
    const Choice own = choose_best(keys, row.scores, arguments.k, packed, values);
    const float sum = tile::sum_lanes<32>(own.score);
    if (lane < arguments.k) {
      const float factor = arguments.renormalize ? arguments.scale / (sum + kLeastSum) : arguments.scale;
      const int64_t pair = int64_t{token} * arguments.k + lane;
      arguments.weights[pair] = own.score * factor;
      arguments.chosen[pair] = own.expert;
      atomicAdd(counts + own.expert, 1);
    }
  }
  if (lane == 0) squares[warp] = square;
#pragma unroll
  for (int i = 0; i < kPer; ++i) {
    if (32 * i + lane < arguments.experts) of_warp[32 * i + lane] = share_sums[i];
  }
  __syncthreads();
  const int64_t at = int64_t{blockIdx.x} * arguments.experts;
  for (int32_t e = static_cast<int32_t>(threadIdx.x); e < arguments.experts; e += kThreads) {
    float share = 0.0f;
#pragma unroll
    for (int i = 0; i < kWarps; ++i) share += of_warps[i * arguments.experts + e];  // in order: the same every time
    arguments.block_counts[at + e] = counts[e];
    arguments.block_shares[at + e] = share;
  }
  if (threadIdx.x == 0) {
    float total = 0.0f;
    for (int32_t i = 0; i < kWarps; ++i) total += squares[i];
    arguments.block_squares[blockIdx.x] = total;
  }
}

}  // namespace kernel_pytorch::moe_routing
