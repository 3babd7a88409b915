// Gates and sums of rows on the lanes of the CPU, built once per instruction level.
#include "kernel_pytorch/base/float_types.h"
#include "kernel_pytorch/cpu/load_store.h"
#include "kernel_pytorch/ops/engines/pointwise/cpu/math_isa.h"
#include "kernel_pytorch/ops/grouped_matmul/cpu/rows.h"

namespace kernel_pytorch::grouped_matmul::KP_ISA_NAMESPACE {
namespace {

using cpu::kLanes;
using cpu::Vec;
using pointwise::Kind;

constexpr int64_t kColumns = 256;  // of the output at a time, in buffers on the stack

template <class Use>
KP_PRIMITIVE void with_type(DType dtype, const Use& use) {
  if (dtype == DType::kFloat32) {
    use(float{});
  } else if (dtype == DType::kBFloat16) {
    use(BFloat16{});
  } else {
    use(Float16{});
  }
}

KP_PRIMITIVE void narrow(const float* from, int64_t count, const RowMemory& to, int64_t row, int64_t column) {
  with_type(to.dtype, [&](auto type) {
    using T = decltype(type);
    T* target = static_cast<T*>(to.data) + row * to.stride + column;
    int64_t j = 0;
    for (; j + kLanes <= count; j += kLanes) cpu::store(target + j, cpu::load(from + j));
    if (j < count) cpu::store_partial(target + j, cpu::load_partial(from + j, count - j), count - j);
  });
}

template <Kind kKind>
KP_PRIMITIVE Vec function(Vec x) {
  return pointwise::KP_ISA_NAMESPACE::function<kKind, pointwise::KP_ISA_NAMESPACE::kFloatBits>(x);
}

// gates[j] = f(gates[j]) * ups[j], up to whole vectors.
template <Kind kKind>
[[gnu::noinline]] void gate(float* gates, const float* ups, int64_t count) {
  for (int64_t j = 0; j < count; j += kLanes) {
    cpu::store(gates + j, function<kKind>(cpu::load(gates + j)) * cpu::load(ups + j));
  }
}
[[gnu::noinline]] void gate_clamped(float* gates, const float* ups, int64_t count, float limit, float slope) {
  const Vec most = cpu::broadcast(limit);
  for (int64_t j = 0; j < count; j += kLanes) {
    const Vec g = cpu::min(most, cpu::load(gates + j));  // in this order a NaN is handed on
    const Vec u = cpu::max(-most, cpu::min(most, cpu::load(ups + j)));
    cpu::store(gates + j, g * function<Kind::kSigmoid>(g * slope) * (u + 1.0f));
  }
}

void gate_by_kind(const GateTask& task, float* gates, const float* ups, int64_t count) {
  if (task.limit > 0) return gate_clamped(gates, ups, count, task.limit, task.slope);
  switch (task.activation) {
    case Kind::kGelu:
      return gate<Kind::kGelu>(gates, ups, count);
    case Kind::kGeluTanh:
      return gate<Kind::kGeluTanh>(gates, ups, count);
    case Kind::kSilu:
      return gate<Kind::kSilu>(gates, ups, count);
    case Kind::kRelu:
      return gate<Kind::kRelu>(gates, ups, count);
    case Kind::kReluSquared:
      return gate<Kind::kReluSquared>(gates, ups, count);
    case Kind::kSigmoid:
      return gate<Kind::kSigmoid>(gates, ups, count);
    case Kind::kTanh:
      return gate<Kind::kTanh>(gates, ups, count);
    case Kind::kIdentity:
      return gate<Kind::kIdentity>(gates, ups, count);
  }
}

}  // namespace

void gate_rows(const GateTask& task);
void gate_rows(const GateTask& task) {
  alignas(64) float gates[kColumns + kLanes] = {}, ups[kColumns + kLanes] = {};
  const int64_t half = task.columns / 2;
  for (int64_t row = 0; row < task.rows; ++row) {
    const float* sums = task.sums + row * task.columns;
    if (task.preactivation.data != nullptr) narrow(sums, task.columns, task.preactivation, row, 0);
    for (int64_t column = 0; column < half; column += kColumns) {
      const int64_t count = half - column < kColumns ? half - column : kColumns;
      for (int64_t j = 0; j < count; ++j) {
        gates[j] = task.is_packed ? sums[column + j] : sums[2 * (column + j)];
        ups[j] = task.is_packed ? sums[half + column + j] : sums[2 * (column + j) + 1];
      }
      gate_by_kind(task, gates, ups, count);
      narrow(gates, count, task.output, row, column);
    }
  }
}

void sum_rows(const SumTask& task);
void sum_rows(const SumTask& task) {
  with_type(task.from.dtype, [&](auto type) {
    using T = decltype(type);
    for (int64_t j = 0; j < task.columns; ++j) task.totals[j] = 0;
    for (int64_t i = 0; i < task.rows; ++i) {
      const int64_t line = task.lines == nullptr ? i : task.lines[i];
      const T* row = static_cast<const T*>(task.from.data) + line * task.from.stride;
      const float factor = task.factors == nullptr ? 1.0f : task.factors[i];
      int64_t j = 0;
      for (; j + kLanes <= task.columns; j += kLanes) {
        cpu::store(task.totals + j, cpu::load(task.totals + j) + cpu::load(row + j) * factor);
      }
      if (j < task.columns) {
        const int64_t lanes = task.columns - j;
        const Vec sum = cpu::load_partial(task.totals + j, lanes) + cpu::load_partial(row + j, lanes) * factor;
        cpu::store_partial(task.totals + j, sum, lanes);
      }
    }
  });
}

}  // namespace kernel_pytorch::grouped_matmul::KP_ISA_NAMESPACE
