// A weighted sum of two rows on the lanes of the CPU, built once per instruction level.
#include "kernel_pytorch/base/float_types.h"
#include "kernel_pytorch/cpu/load_store.h"
#include "kernel_pytorch/ops/merge_attention/cpu/row.h"

namespace kernel_pytorch::merge_attention::KP_ISA_NAMESPACE {
namespace {

template <class T>
KP_PRIMITIVE cpu::Vec weighted(const void* row, int64_t i, int64_t left, float weight) {
  if (weight == 0) return cpu::broadcast(0.0f);
  const T* from = static_cast<const T*>(row) + i;
  const cpu::Vec lanes = left >= cpu::kLanes ? cpu::load(from) : cpu::load_partial(from, left);
  return lanes * cpu::broadcast(weight);
}

template <class T>
void merge(const RowTask& task) {
  for (int64_t i = 0; i < task.size; i += cpu::kLanes) {
    const int64_t left = task.size - i;
    const cpu::Vec sum =
        weighted<T>(task.first, i, left, task.first_weight) + weighted<T>(task.second, i, left, task.second_weight);
    T* const to = static_cast<T*>(task.output) + i;
    if (left >= cpu::kLanes) {
      cpu::store(to, sum);
    } else {
      cpu::store_partial(to, sum, left);
    }
  }
}

}  // namespace

extern const RowKernels kRowKernels{{merge<float>, merge<BFloat16>, merge<Float16>}};

}  // namespace kernel_pytorch::merge_attention::KP_ISA_NAMESPACE
