// A row's token without sorting, built once per instruction level. Top-k and top-p are one search: the key at which
// what lies above it (tokens, or their weights) reaches a goal. A round adds a histogram of the next 11 bits of the
// keys and goes on in the bin that reaches it. Chunks of logits stay in the first cache between their steps.
#include "kernel_pytorch/base/float_types.h"
#include "kernel_pytorch/cpu/load_store.h"
#include "kernel_pytorch/ops/sample/cpu/row.h"
#include "kernel_pytorch/ops/sample/weight_cuda.h"

namespace kernel_pytorch::sample::KP_ISA_NAMESPACE {
namespace {

constexpr int64_t kChunk = 64;
constexpr int kBinBits = 11;

struct Chunk {
  alignas(64) float logits[kChunk];
  alignas(64) uint32_t keys[kChunk];
  int64_t count;
};
KP_PRIMITIVE void weigh(const Chunk& chunk, const Scale& scale, uint64_t* weights) {
  for (int64_t i = 0; i < kChunk; ++i) weights[i] = chunk.keys[i] != 0 ? weight_of(scale, chunk.logits[i]) : 0;
}

// Places past the end have the key 0, as tokens that nobody chooses.
template <class T, class Visit>
KP_PRIMITIVE void over_chunks(const RowTask& task, const Visit& visit) {
  const T* logits = static_cast<const T*>(task.logits);
  Chunk chunk;
  for (int64_t begin = 0; begin < task.count; begin += kChunk) {
    chunk.count = task.count - begin < kChunk ? task.count - begin : kChunk;
    for (int64_t i = 0; i < kChunk; i += cpu::kLanes) {
      const int64_t left = chunk.count - i;
      const cpu::Vec lanes = left >= cpu::kLanes ? cpu::load(logits + begin + i)
                                                 : cpu::load_partial(logits + begin + i, left > 0 ? left : 0);
      cpu::store(chunk.logits + i, lanes);
    }
    for (int64_t i = chunk.count; i < kChunk; ++i) chunk.logits[i] = -__builtin_inff();
    for (int64_t i = 0; i < kChunk; ++i) chunk.keys[i] = key_of(chunk.logits[i]);
    if (!visit(chunk, begin)) return;
  }
}

struct Largest {
  uint32_t key = 0;
  int64_t index = -1;
};
template <class T>
KP_PRIMITIVE Largest largest_of(const RowTask& task) {
  Largest largest;
  over_chunks<T>(task, [&](const Chunk& chunk, int64_t begin) {
    uint32_t most = 0;
    for (int64_t i = 0; i < kChunk; ++i) most = chunk.keys[i] > most ? chunk.keys[i] : most;
    if (most > largest.key) {
      largest.key = most;
      int64_t i = 0;
      while (chunk.keys[i] != most) ++i;
      largest.index = begin + i;
    }
    return true;
  });
  return largest;
}

// The largest key for which it and those above reach the goal; `floor` where all of them do not. The goal follows from
// the total.
template <class T, bool kWeighs, class Goal>
KP_PRIMITIVE uint32_t search(const RowTask& task, const Scale& scale, uint32_t floor, uint32_t ceiling,
                             const Goal& goal_of_total) {
  const uint32_t range = ceiling - floor;
  const int bits = range == 0 ? 1 : 32 - __builtin_clz(range);
  int shift = bits > kBinBits ? bits - kBinBits : 0;
  uint32_t low = floor, high = ceiling;
  uint64_t above = 0, goal = 0;
  for (bool is_first = true;; is_first = false) {
    uint64_t bins[1 << kBinBits] = {};
    over_chunks<T>(task, [&](const Chunk& chunk, int64_t) {
      uint64_t weights[kChunk];
      if constexpr (kWeighs) weigh(chunk, scale, weights);
      for (int64_t i = 0; i < kChunk; ++i) {
        const uint32_t key = chunk.keys[i];
        if (key >= low && key <= high) bins[(key - low) >> shift] += kWeighs ? weights[i] : 1;
      }
      return true;
    });
    if (is_first) {
      uint64_t total = 0;
      for (const uint64_t bin : bins) total += bin;
      goal = goal_of_total(total);
      if (total < goal) return floor;
    }
    int bin = (1 << kBinBits) - 1;
    for (; above + bins[bin] < goal; --bin) above += bins[bin];
    low += static_cast<uint32_t>(bin) << shift;
    if (shift == 0) return low;
    const uint32_t last = low + ((1u << shift) - 1);
    high = last < high ? last : high;
    shift = shift > kBinBits ? shift - kBinBits : 0;
  }
}

template <class T>
int64_t draw(const RowTask& task) {
  const Largest largest = largest_of<T>(task);
  if (largest.index < 0 || !(task.temperature > kLeastTemperature)) return largest.index;
  const Scale scale = scale_of(value_of_key(largest.key), task.temperature);
  uint32_t floor = least_key(scale);
  if (task.top_k > 0) {
    floor =
        search<T, false>(task, scale, floor, largest.key, [&](uint64_t) { return static_cast<uint64_t>(task.top_k); });
  }
  if (limits_p(task.top_p)) {
    floor =
        search<T, true>(task, scale, floor, largest.key, [&](uint64_t total) { return goal_of(task.top_p, total); });
  }
  const uint64_t least = least_weight(task.min_p);
  uint64_t total = 0;
  const auto sum_of = [&](const Chunk& chunk, uint64_t* weights) {
    weigh(chunk, scale, weights);
    uint64_t sum = 0;
    for (int64_t i = 0; i < kChunk; ++i) {
      weights[i] = chunk.keys[i] >= floor && weights[i] >= least ? weights[i] : 0;
      sum += weights[i];
    }
    return sum;
  };
  uint64_t weights[kChunk];
  over_chunks<T>(task, [&](const Chunk& chunk, int64_t) {
    total += sum_of(chunk, weights);
    return true;
  });
  const uint64_t target = upper_product(task.random, total);
  uint64_t before = 0;
  int64_t token = -1;
  over_chunks<T>(task, [&](const Chunk& chunk, int64_t begin) {
    const uint64_t sum = sum_of(chunk, weights);
    if (before + sum <= target) {
      before += sum;
      return true;
    }
    for (token = begin; before + weights[token - begin] <= target; ++token) before += weights[token - begin];
    return false;
  });
  return token;
}

}  // namespace

extern const RowKernels kRowKernels{{draw<float>, draw<BFloat16>, draw<Float16>}};

}  // namespace kernel_pytorch::sample::KP_ISA_NAMESPACE
