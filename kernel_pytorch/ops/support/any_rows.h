// Views as the kernels for any strides take them.
#pragma once

#include <algorithm>

#include "kernel_pytorch/base/config_fields.h"
#include "kernel_pytorch/base/rows.h"
#include "kernel_pytorch/ops/support/any_rows_cuda.h"

namespace kernel_pytorch {

static_assert(kAnyRank == kMaxRank);

// The config of kernels that take rows of any strides.
struct RowThreads {
  int row_threads = 32;  // that share a row
};
inline constexpr auto kRowThreadsFields = config_fields<RowThreads>(config_field<&RowThreads::row_threads>());
constexpr ConfigFields fields_of(const RowThreads&) {
  return kRowThreadsFields;
}

inline AnyShape any_shape_of(const TensorView& view) {
  AnyShape shape{.rows = rows_of(view), .columns = columns_of(view), .leading = {}, .leading_count = view.rank - 1};
  std::copy_n(view.sizes.begin(), shape.leading_count, shape.leading);
  return shape;
}

inline AnyTensor any_tensor_of(const TensorView& view) {
  AnyTensor tensor{.data = nullptr, .leading_strides = {}, .column_stride = 0};
  if (!view.is_present()) return tensor;
  tensor.data = view.data;
  std::copy_n(view.strides.begin(), view.rank - 1, tensor.leading_strides);
  tensor.column_stride = view.stride(-1);
  return tensor;
}

}  // namespace kernel_pytorch
