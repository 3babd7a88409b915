// A tensor seen as rows: the last dimension is the columns, all others are merged into rows where strides allow.
#pragma once

#include <cstdint>
#include <span>

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
