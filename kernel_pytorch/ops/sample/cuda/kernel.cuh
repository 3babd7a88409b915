// A row's token without sorting: a block per row, each warp a part of the vocabulary in its order. Top-k and top-p are
// one search, as on the CPU: a round adds a histogram of the next 11 bits of the keys in shared memory and goes on in
// the bin that reaches the goal; keys of 16-bit logits need one or two rounds. A weight of 36 bits is added as three
// words of 12, since shared memory adds 32 bits at once but loops for 64. All sums are integers: the result does not
// depend on timing. sm_80.
#pragma once

#include "kernel_pytorch/base/philox.h"
#include "kernel_pytorch/cuda/tile/dependent_launch.cuh"
#include "kernel_pytorch/cuda/tile/reduce.cuh"
#include "kernel_pytorch/cuda/tile/vector.cuh"
#include "kernel_pytorch/ops/sample/cuda/arguments_cuda.h"
#include "kernel_pytorch/ops/sample/weight_cuda.h"
#include "kernel_pytorch/ops/support/indices_cuda.h"

namespace kernel_pytorch::sample {

inline constexpr int kBinBits = 11, kBins = 1 << kBinBits, kPartBits = 12, kParts = 3;
static_assert(kBins == 2 * kThreads && kParts * kPartBits == kWeightBits);

// Lowest bits of a key that are the same for all values of a sign.
template <class T>
inline constexpr int kKeyShift = 0;
template <>
inline constexpr int kKeyShift<tile::BFloat16> = 16;
template <>
inline constexpr int kKeyShift<tile::Float16> = 13;

struct Shared {
  uint32_t bins[kParts][kBins];
  uint64_t partials[2][kWarps];
  uint64_t above, total;
  int32_t bin;
};

// The row, and this warp's part of it.
template <class T>
struct Row {
  static constexpr int kUnit = tile::Vector<T>::kCount;
  const T* logits;
  int32_t begin, end;
  bool is_aligned;

  __device__ __forceinline__ void load(int32_t at, float (&values)[kUnit]) const {
    if (is_aligned && at + kUnit <= end) {
      tile::load_shared_by_all<T>(logits + at).unpack(values);
    } else {
#pragma unroll
      for (int i = 0; i < kUnit; ++i) {
        values[i] = at + i < end ? tile::to_float(logits[at + i]) : __int_as_float(0xff800000);
      }
    }
  }
  // visit(index, logit, key), a thread's in ascending order; tokens that nobody chooses are left out.
  template <class Visit>
  __device__ __forceinline__ void over(const Visit& visit) const {
    for (int32_t at = begin + static_cast<int32_t>(threadIdx.x % 32) * kUnit; at < end; at += 32 * kUnit) {
      float values[kUnit];
      load(at, values);
#pragma unroll
      for (int i = 0; i < kUnit; ++i) {
        const uint32_t key = key_of(values[i]);
        if (key != 0) visit(at + i, values[i], key);
      }
    }
  }
};

// Over the block, in all threads.
template <class Combine>
__device__ __forceinline__ uint64_t over_block(uint64_t value, Shared& shared, const Combine& combine) {
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) {
    value = combine(value, __shfl_xor_sync(0xffffffffu, value, distance));
  }
  __syncthreads();
  if (threadIdx.x % 32 == 0) shared.partials[0][threadIdx.x / 32] = value;
  __syncthreads();
  uint64_t all = shared.partials[0][threadIdx.x % 32];
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) {
    all = combine(all, __shfl_xor_sync(0xffffffffu, all, distance));
  }
  return all;
}

// The sum of the values of all lanes up to this one.
__device__ __forceinline__ uint64_t sum_up_to_lane(uint64_t value) {
  const int lane = static_cast<int>(threadIdx.x % 32);
#pragma unroll
  for (int distance = 1; distance < 32; distance *= 2) {
    const uint64_t other = __shfl_up_sync(0xffffffffu, value, distance);
    if (lane >= distance) value += other;
  }
  return value;
}
__device__ __forceinline__ uint64_t sum_up_to_thread(uint64_t value, Shared& shared) {
  const int warp = static_cast<int>(threadIdx.x / 32), lane = static_cast<int>(threadIdx.x % 32);
  const uint64_t in_warp = sum_up_to_lane(value);
  __syncthreads();
  if (lane == 31) shared.partials[0][warp] = in_warp;
  __syncthreads();
  const uint64_t up_to_warp = sum_up_to_lane(shared.partials[0][lane]);
  const uint64_t before = __shfl_sync(0xffffffffu, up_to_warp, warp == 0 ? 0 : warp - 1);
  return in_warp + (warp == 0 ? 0 : before);
}

__device__ __forceinline__ uint64_t bin_sum(const Shared& shared, int bin) {
  uint64_t sum = 0;
#pragma unroll
  for (int part = 0; part < kParts; ++part) {
    sum += static_cast<uint64_t>(shared.bins[part][bin]) << (part * kPartBits);
  }
  return sum;
}

// The largest key for which it and those above reach the goal; `floor` where all of them do not.
template <class T, bool kWeighs, class Goal>
__device__ __forceinline__ uint32_t search(const Row<T>& row, const Scale& scale, uint32_t floor, uint32_t ceiling,
                                           const Goal& goal_of_total, Shared& shared) {
  constexpr int kShift = kKeyShift<T>;
  const int thread = static_cast<int>(threadIdx.x);
  uint32_t low = floor >> kShift, high = ceiling >> kShift;
  const int bits = 32 - __clz(static_cast<int>(high - low));
  int shift = bits > kBinBits ? bits - kBinBits : 0;
  uint64_t above = 0, goal = 0;
  for (bool is_first = true;; is_first = false) {
    __syncthreads();
    for (int i = thread; i < kParts * kBins; i += kThreads) shared.bins[i / kBins][i % kBins] = 0;
    __syncthreads();
    row.over([&](int32_t, float logit, uint32_t whole_key) {
      const uint32_t key = whole_key >> kShift;
      if (whole_key < floor || key < low || key > high) return;
      const uint32_t bin = (key - low) >> shift;
      if constexpr (kWeighs) {
        const uint64_t weight = weight_of(scale, logit);
#pragma unroll
        for (int part = 0; part < kParts; ++part) {
          const uint32_t word = static_cast<uint32_t>(weight >> (part * kPartBits)) & ((1u << kPartBits) - 1);
          if (word != 0) atomicAdd(&shared.bins[part][bin], word);
        }
      } else {
        atomicAdd(&shared.bins[0][bin], 1u);
      }
    });
    __syncthreads();
    // The highest bins first: thread 0 has the last two.
    const int top = kBins - 1 - 2 * thread;
    const uint64_t first = bin_sum(shared, top), second = bin_sum(shared, top - 1);
    const uint64_t end = sum_up_to_thread(first + second, shared), begin = end - first - second;
    if (is_first) {
      if (thread == kThreads - 1) shared.total = end;
      __syncthreads();
      goal = goal_of_total(shared.total);
      if (shared.total < goal) return floor;
    }
    if (above + begin < goal && above + end >= goal) {
      const bool is_second = above + begin + first < goal;
      shared.bin = is_second ? top - 1 : top;
      shared.above = above + begin + (is_second ? first : 0);
    }
    __syncthreads();
    low += static_cast<uint32_t>(shared.bin) << shift;
    above = shared.above;
    if (shift == 0) return max(low << kShift, floor);
    high = min(high, low + ((1u << shift) - 1));
    shift = shift > kBinBits ? shift - kBinBits : 0;
  }
}

// The token of `target` in the part of one warp, whose kept weights before it are `before`.
template <class T, class Weight>
__device__ __forceinline__ int32_t find(const Row<T>& row, uint64_t target, uint64_t before, const Weight& weight_at) {
  constexpr int kUnit = Row<T>::kUnit;
  const int lane = static_cast<int>(threadIdx.x % 32);
  for (int32_t at = row.begin + lane * kUnit; __any_sync(0xffffffffu, at < row.end); at += 32 * kUnit) {
    uint64_t weights[kUnit], sum = 0;
    float values[kUnit];
    row.load(at, values);
#pragma unroll
    for (int i = 0; i < kUnit; ++i) {
      const uint32_t key = key_of(values[i]);
      weights[i] = key != 0 ? weight_at(values[i], key) : 0;
      sum += weights[i];
    }
    const uint64_t up_to = before + sum_up_to_lane(sum);
    const uint32_t reached = __ballot_sync(0xffffffffu, up_to > target);
    if (reached != 0) {
      int32_t token = -1;
      uint64_t so_far = up_to - sum;
#pragma unroll
      for (int i = 0; i < kUnit; ++i) {
        so_far += weights[i];
        if (token < 0 && so_far > target) token = at + i;
      }
      return __shfl_sync(0xffffffffu, token, __ffs(static_cast<int>(reached)) - 1);
    }
    before = __shfl_sync(0xffffffffu, up_to, 31);
  }
  return -1;  // cannot be: this warp's sum ends above the target
}

__device__ __forceinline__ uint64_t whole_at(const void* numbers, bool is_wide, int64_t row) {
  return numbers == nullptr ? 0 : static_cast<uint64_t>(index_at(numbers, is_wide, row));
}

template <class T>
__global__ void __launch_bounds__(kThreads) draw(const __grid_constant__ DrawArguments arguments) {
  __shared__ Shared shared;
  tile::follow_closely();
  const int64_t number = blockIdx.x;
  const int32_t warp = static_cast<int32_t>(threadIdx.x / 32);
  constexpr int32_t kTurn = 32 * Row<T>::kUnit;
  const int32_t part = (arguments.count + kWarps * kTurn - 1) / (kWarps * kTurn) * kTurn;
  const Row<T> row{static_cast<const T*>(arguments.logits) + number * arguments.row_stride,
                   min(warp * part, arguments.count), min((warp + 1) * part, arguments.count), arguments.is_aligned};

  uint64_t best = 0;  // the key, and the complement of the index, so that the first of equal ones is the largest
  row.over([&](int32_t index, float, uint32_t key) {
    if (key > static_cast<uint32_t>(best >> 32)) {
      best = static_cast<uint64_t>(key) << 32 | ~static_cast<uint32_t>(index);
    }
  });
  best = over_block(best, shared, [](uint64_t a, uint64_t b) { return a > b ? a : b; });
  const uint32_t largest = static_cast<uint32_t>(best >> 32);
  const float temperature = arguments.temperature == nullptr ? 1.0f : arguments.temperature[number];
  if (largest == 0 || !(temperature > kLeastTemperature)) {
    if (threadIdx.x == 0) {
      arguments.tokens[number] = largest == 0 ? -1 : static_cast<int32_t>(~static_cast<uint32_t>(best));
    }
    return;
  }

  const Scale scale = scale_of(value_of_key(largest), temperature);
  const int32_t top_k = arguments.top_k == nullptr ? 0 : arguments.top_k[number];
  const float top_p = arguments.top_p == nullptr ? 1.0f : arguments.top_p[number];
  uint32_t floor = least_key(scale);
  if (top_k > 0) {
    floor = search<T, false>(
        row, scale, floor, largest, [&](uint64_t) { return static_cast<uint64_t>(top_k); }, shared);
  }
  if (limits_p(top_p)) {
    floor = search<T, true>(
        row, scale, floor, largest, [&](uint64_t total) { return goal_of(top_p, total); }, shared);
  }

  const uint64_t least = least_weight(arguments.min_p == nullptr ? 0.0f : arguments.min_p[number]);
  const auto weight_at = [&](float logit, uint32_t key) -> uint64_t {
    if (key < floor) return 0;
    const uint64_t weight = weight_of(scale, logit);
    return weight >= least ? weight : 0;
  };
  uint64_t sum = 0;
  row.over([&](int32_t, float logit, uint32_t key) { sum += weight_at(logit, key); });
  sum = tile::sum_lanes<32>(sum);
  __syncthreads();
  if (threadIdx.x % 32 == 0) shared.partials[1][warp] = sum;
  __syncthreads();
  const uint64_t up_to = sum_up_to_lane(shared.partials[1][threadIdx.x % 32]);
  const uint64_t total = __shfl_sync(0xffffffffu, up_to, 31);
  const uint64_t seed = whole_at(arguments.seeds, arguments.has_wide_seeds, number);
  const uint64_t position = whole_at(arguments.positions, arguments.has_wide_positions, number);
  const PhiloxBlock bits = philox(seed, position, 0);
  const uint64_t target = upper_product(static_cast<uint64_t>(bits.words[1]) << 32 | bits.words[0], total);
  const int chosen = __ffs(static_cast<int>(__ballot_sync(0xffffffffu, up_to > target))) - 1;
  if (warp != chosen) return;
  const uint64_t before = __shfl_sync(0xffffffffu, up_to, chosen) - sum;
  const int32_t token = find(row, target, before, weight_at);
  if (threadIdx.x % 32 == 0) arguments.tokens[number] = token;
}

}  // namespace kernel_pytorch::sample
