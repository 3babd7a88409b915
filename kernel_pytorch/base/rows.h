// A tensor seen as rows: the last dimension is the columns, all others are merged into rows where strides allow.
#pragma once

#include <cstdint>
#include <span>

#include "kernel_pytorch/base/export.h"
#include "kernel_pytorch/base/tensor_view.h"

namespace kernel_pytorch {

inline int64_t columns_of(const TensorView& view) {
  return view.size(-1);
}
inline int64_t rows_of(const TensorView& view) {
  int64_t rows = 1;
  for (int i = 0; i + 1 < view.rank; ++i) rows *= view.sizes[i];
  return rows;
}

// Merges leading dimensions of all views together wherever every one of them can be addressed with one stride, so that
// nearly every problem becomes [rows, columns]. Views must agree in shape; absent ones are skipped.
void merge_leading_dimensions(std::span<TensorView*> views);

// Merges all but the last `kept` dimensions into one; false, and the view as it was, where one stride cannot address
// them.
KP_EXPORT bool merge_front(TensorView& view, int kept);

// Whether the view begins at a multiple of so many bytes. An absent one does.
inline bool is_aligned(const TensorView& view, int64_t bytes) {
  return reinterpret_cast<uintptr_t>(view.data) % static_cast<uintptr_t>(bytes) == 0;
}

inline constexpr int64_t kVectorBytes = 16;  // of a GPU's widest load, and what its tensor maps ask for
inline constexpr int64_t kLineBytes = 64;    // of a CPU's cache line, which stores past the caches fill

// Whether the view begins, and every row of it, at a multiple of so many bytes. Rows lie along the last dimension,
// unless another is named as dense. An absent view's do.
inline bool has_aligned_rows(const TensorView& view, int64_t bytes = kVectorBytes, int dense = -1) {
  if (!is_aligned(view, bytes)) return false;
  for (int i = 0; i < view.rank; ++i) {
    const bool is_step = i != (dense < 0 ? view.rank + dense : dense) && view.sizes[i] > 1;
    if (is_step && view.strides[i] * size_of(view.dtype) % bytes != 0) return false;
  }
  return true;
}

// Element offset of a row: one multiply where the leading dimensions merged into one.
inline int64_t row_offset(const TensorView& view, int64_t row) {
  if (view.rank == 2) return row * view.strides[0];
  int64_t offset = 0;
  for (int i = view.rank - 2; i >= 0; --i) {
    offset += row % view.sizes[i] * view.strides[i];
    row /= view.sizes[i];
  }
  return offset;
}

}  // namespace kernel_pytorch
