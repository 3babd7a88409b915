// Sums of rows and scaled copies of a row on the lanes of the CPU, built once per instruction level.
#include "kernel_pytorch/base/float_types.h"
#include "kernel_pytorch/cpu/load_store.h"
#include "kernel_pytorch/cpu/vec.h"
#include "kernel_pytorch/ops/mean_pooling/cpu/rows.h"

namespace kernel_pytorch::mean_pooling::KP_ISA_NAMESPACE {
namespace {

using cpu::kLanes;
using cpu::Vec;

template <class T>
void add_rows(const void* from, int64_t row_stride, int64_t count, int64_t columns, float* totals) {
  const T* rows = static_cast<const T*>(from);
  int64_t i = 0;
  // Four rows at a time: the totals, which wait in the nearest cache, are read and written a quarter as often.
  for (; i + 4 <= count; i += 4) {
    const T* row = rows + i * row_stride;
    int64_t j = 0;
    for (; j + kLanes <= columns; j += kLanes) {
      for (int k = 4; k < 8; ++k) cpu::prefetch_far(row + k * row_stride + j);
      // In pairs: a sum of a quarter as many terms rounds half as much.
      const Vec first = cpu::load(row + j) + cpu::load(row + row_stride + j);
      const Vec second = cpu::load(row + 2 * row_stride + j) + cpu::load(row + 3 * row_stride + j);
      cpu::store(totals + j, cpu::load(totals + j) + (first + second));
    }
    for (; j < columns; ++j) {
      const auto at = [&](int k) { return cpu::load_partial(row + k * row_stride + j, 1)[0]; };
      totals[j] += (at(0) + at(1)) + (at(2) + at(3));
    }
  }
  for (; i < count; ++i) {
    const T* row = rows + i * row_stride;
    for (int64_t j = 0; j < columns; j += kLanes) {
      const int64_t lanes = columns - j < kLanes ? columns - j : kLanes;
      cpu::store_partial(totals + j, cpu::load_partial(totals + j, lanes) + cpu::load_partial(row + j, lanes), lanes);
    }
  }
}

template <class T>
KP_PRIMITIVE void divide(T* to, const auto* from, float count, int64_t columns) {
  int64_t j = 0;
  for (; j + kLanes <= columns; j += kLanes) cpu::store(to + j, cpu::load(from + j) / count);
  if (j < columns) cpu::store_partial(to + j, cpu::load_partial(from + j, columns - j) / count, columns - j);
}

template <class T>
void divide_floats(void* to, const float* from, float count, int64_t columns) {
  divide(static_cast<T*>(to), from, count, columns);
}

// The quotients wait in the nearest cache, so that each is divided once for all rows.
template <class T>
void divide_rows(void* to, int64_t row_stride, int64_t rows, const void* from, float count, int64_t columns,
                 bool streams) {
  constexpr int64_t kColumns = 2048;
  alignas(64) float quotients[kColumns];
  for (int64_t column = 0; column < columns; column += kColumns) {
    const int64_t width = columns - column < kColumns ? columns - column : kColumns;
    divide(quotients, static_cast<const T*>(from) + column, count, width);
    for (int64_t i = 0; i < rows; ++i) {
      T* row = static_cast<T*>(to) + i * row_stride + column;
      int64_t j = 0;
      for (; streams && j + 2 * kLanes <= width; j += 2 * kLanes) {
        cpu::stream2(row + j, cpu::PairOf<T>{cpu::load(quotients + j), cpu::load(quotients + j + kLanes)});
      }
      for (; j + kLanes <= width; j += kLanes) cpu::store(row + j, cpu::load(quotients + j));
      if (j < width) cpu::store_partial(row + j, cpu::load_partial(quotients + j, width - j), width - j);
    }
  }
  if (streams) cpu::stream_fence();
}

template <class T>
constexpr RowKernels kernels_for() {
  return {add_rows<T>, divide_floats<T>, divide_rows<T>};
}

}  // namespace

extern const RowKernels kRowKernels[kTypesCount] = {kernels_for<float>(), kernels_for<BFloat16>(),
                                                    kernels_for<Float16>()};

}  // namespace kernel_pytorch::mean_pooling::KP_ISA_NAMESPACE
