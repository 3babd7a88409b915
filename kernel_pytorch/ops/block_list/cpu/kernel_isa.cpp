// Scores of the blocks of one row on the lanes of the CPU, built once per instruction level: four parts at a time share
// the loads of the query.
#include "kernel_pytorch/base/float_types.h"
#include "kernel_pytorch/cpu/load_store.h"
#include "kernel_pytorch/cpu/vec.h"
#include "kernel_pytorch/ops/block_list/cpu/scores.h"

namespace kernel_pytorch::block_list::KP_ISA_NAMESPACE {
namespace {

using cpu::kLanes;
using cpu::Vec;

template <class T, int kParts>
KP_PRIMITIVE void dot(const T* query, const T* keys, int64_t key_stride, int64_t size, float* sums) {
  Vec totals[kParts] = {};
  int64_t i = 0;
  for (; i + kLanes <= size; i += kLanes) {
    const Vec mean = cpu::load(query + i);
    for (int part = 0; part < kParts; ++part) totals[part] += mean * cpu::load(keys + part * key_stride + i);
  }
  if (i < size) {
    const Vec mean = cpu::load_partial(query + i, size - i);
    for (int part = 0; part < kParts; ++part) {
      totals[part] += mean * cpu::load_partial(keys + part * key_stride + i, size - i);
    }
  }
  for (int part = 0; part < kParts; ++part) sums[part] = cpu::horizontal_sum(totals[part]);
}

template <class T>
void score(const ScoreTask& task) {
  const T* query = static_cast<const T*>(task.query);
  const T* keys = static_cast<const T*>(task.keys);
  for (int32_t column = 0; column < task.columns; ++column) {
    const int64_t begin = column * task.key_parts;
    const int64_t end = begin + task.key_parts < task.parts ? begin + task.key_parts : task.parts;
    float best = __builtin_nanf("");
    for (int64_t part = begin; part < end; part += 4) {
      float sums[4];
      const int64_t count = end - part < 4 ? end - part : 4;
      const T* from = keys + part * task.key_stride;
      if (count == 4) {
        dot<T, 4>(query, from, task.key_stride, task.size, sums);
      } else {
        for (int64_t i = 0; i < count; ++i) dot<T, 1>(query, from + i * task.key_stride, 0, task.size, sums + i);
      }
      for (int64_t i = 0; i < count; ++i) best = best >= sums[i] || sums[i] != sums[i] ? best : sums[i];
    }
    task.scores[column] = best;
  }
}

}  // namespace

extern const ScoreKernels kScoreKernels[kScoreTypes] = {{score<float>}, {score<BFloat16>}, {score<Float16>}};

}  // namespace kernel_pytorch::block_list::KP_ISA_NAMESPACE
