// Scores of a tile of keys for one query on the lanes of the CPU, built once per instruction level: a few heads by four
// keys at a time, a vector of partial sums for each pair.
#include "kernel_pytorch/base/float_types.h"
#include "kernel_pytorch/cpu/fold.h"
#include "kernel_pytorch/cpu/load_store.h"
#include "kernel_pytorch/ops/lightning_indexer/cpu/scores.h"

namespace kernel_pytorch::lightning_indexer::KP_ISA_NAMESPACE {
namespace {

using cpu::kLanes;
using cpu::Vec;
using cpu::Vec4;

constexpr int kKeys = 4;
constexpr int kTileHeads = kLanes == 16 ? 4 : 2;

template <int kHeads>
KP_PRIMITIVE Vec4 add_heads(const ScoreTask& task, int64_t head, const float* keys, Vec4 total) {
  Vec sums[kHeads][kKeys] = {};
  for (int64_t d = 0; d < task.padded; d += kLanes) {
    Vec parts[kKeys];
    for (int k = 0; k < kKeys; ++k) parts[k] = cpu::load(keys + k * task.padded + d);
    for (int h = 0; h < kHeads; ++h) {
      const Vec own = cpu::load(task.query + (head + h) * task.padded + d);
      for (int k = 0; k < kKeys; ++k) sums[h][k] += own * parts[k];
    }
  }
  for (int h = 0; h < kHeads; ++h) {
    const Vec4 dots = cpu::sums_of(sums[h][0], sums[h][1], sums[h][2], sums[h][3]);
    total += task.weights[head + h] * (dots < 0.0f ? Vec4{} : dots);  // a NaN stays one
  }
  return total;
}

void score(const ScoreTask& task) {
  for (int64_t key = 0; key < kTileKeys; key += kKeys) {
    const float* keys = task.keys + key * task.padded;
    Vec4 total{};
    int64_t head = 0;
    for (; head + kTileHeads <= task.heads; head += kTileHeads) total = add_heads<kTileHeads>(task, head, keys, total);
    for (; head < task.heads; ++head) total = add_heads<1>(task, head, keys, total);
    __builtin_memcpy(task.scores + key, &total, sizeof(total));
  }
}

template <class T>
void load(const void* from, int64_t count, float* to) {
  const T* row = static_cast<const T*>(from);
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) cpu::store(to + i, cpu::load(row + i));
  if (i < count) cpu::store(to + i, cpu::load_partial(row + i, count - i)), i += kLanes;
  for (; i < (count + kPadding - 1) / kPadding * kPadding; i += kLanes) cpu::store(to + i, Vec{});
}

}  // namespace

extern const ScoreKernels kScoreKernels{score, {load<float>, load<BFloat16>, load<Float16>, load<Float8E4M3>}};

}  // namespace kernel_pytorch::lightning_indexer::KP_ISA_NAMESPACE
