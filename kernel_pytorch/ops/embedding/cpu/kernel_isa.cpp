// Rows of a table on the lanes of the CPU, built once per instruction level: copies past the caches, and sums of rows
// held in registers, four vectors of columns at a time.
#include "kernel_pytorch/base/float_types.h"
#include "kernel_pytorch/cpu/load_store.h"
#include "kernel_pytorch/cpu/vec.h"
#include "kernel_pytorch/ops/embedding/cpu/rows.h"

namespace kernel_pytorch::embedding::KP_ISA_NAMESPACE {
namespace {

using cpu::kLanesOf;
using cpu::VecOf;

// The processor stops to fetch ahead at the end of a page, and nothing tells it where the next row lies. A fence behind
// each row would wait for its last stores.
void copy(const CopiedRow& row) {
  constexpr int64_t kAheadBytes = 4096;
  auto* target = static_cast<char*>(row.to);
  const auto* source = static_cast<const char*>(row.from);
  const auto* next = static_cast<const char*>(row.next != nullptr ? row.next : row.from);
  for (int64_t line = 0; line < row.bytes; line += 64) {
    const int64_t ahead = line + kAheadBytes;
    if (ahead < row.bytes) {
      cpu::prefetch_near(source + ahead);
    } else if (ahead - row.bytes < row.bytes) {
      cpu::prefetch_near(next + (ahead - row.bytes));
    }
    for (int64_t i = line; i < line + 64; i += cpu::kVectorBytes) {
      cpu::stream_storage(target + i, cpu::load_storage<cpu::VecU>(source + i));
    }
  }
  if (row.next == nullptr) cpu::stream_fence();
}

// kStream: past the caches; every group of columns is then aligned to what is stored at once.
template <class T, bool kStream>
KP_PRIMITIVE void sum_row_columns(const RowSumArguments& arguments) {
  constexpr int kStep = kLanesOf<T>;
  const T* rows = static_cast<const T*>(arguments.rows);
  T* sum = static_cast<T*>(arguments.sum);
  int64_t j = 0;
  for (; j + 4 * kStep <= arguments.columns; j += 4 * kStep) {
    VecOf<T> totals[4] = {};
    for (int64_t i = 0; i < arguments.count; ++i) {
      const T* row = rows + arguments.positions[i] * arguments.row_stride_elements + j;
      for (int k = 0; k < 4; ++k) totals[k] += cpu::load(row + k * kStep);
    }
    for (int k = 0; k < 4; k += 2) {
      const cpu::PairOf<T> pair{totals[k], totals[k + 1]};
      if constexpr (kStream) {
        cpu::stream2(sum + j + k * kStep, pair);
      } else {
        cpu::store2(sum + j + k * kStep, pair);
      }
    }
  }
  for (; j < arguments.columns; j += kStep) {
    const int64_t lanes = arguments.columns - j < kStep ? arguments.columns - j : kStep;
    VecOf<T> total{};
    for (int64_t i = 0; i < arguments.count; ++i) {
      total += cpu::load_partial(rows + arguments.positions[i] * arguments.row_stride_elements + j, lanes);
    }
    cpu::store_partial(sum + j, total, lanes);
  }
}

template <class T>
void sum_rows(const RowSumArguments& arguments) {
  if (!arguments.streams) return sum_row_columns<T, false>(arguments);
  sum_row_columns<T, true>(arguments);
  cpu::stream_fence();
}

}  // namespace

extern const RowKernels kRowKernels = {copy,
                                       {sum_rows<float>, sum_rows<double>, sum_rows<BFloat16>, sum_rows<Float16>}};

}  // namespace kernel_pytorch::embedding::KP_ISA_NAMESPACE
