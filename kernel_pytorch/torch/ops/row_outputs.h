// The outputs that ops over rows share: a tensor like another, one number per row, and the stand-in for an output that
// was not asked for.
#pragma once

#include "kernel_pytorch/base/error.h"
#include "kernel_pytorch/torch/tensor_view.h"

namespace kernel_pytorch::torch_ops {

inline NewTensor make_like(const TensorView& view) {
  return make_tensor(view.shape(), view.dtype, view.device);
}

// Shaped like x without its columns; the core sees it as [rows].
inline NewTensor make_row_statistic(const TensorView& x) {
  const size_t leading_dimensions = x.rank > 0 ? static_cast<size_t>(x.rank - 1) : 0;
  const DType dtype = x.dtype == DType::kFloat64 ? DType::kFloat64 : DType::kFloat32;
  NewTensor statistic = make_tensor(x.shape().first(leading_dimensions), dtype, x.device);
  statistic.view = contiguous_view(statistic.view.data, dtype, {statistic.view.element_count()}, x.device);
  return statistic;
}

// `fallback` gives type and device of the empty stand-in. Asking for the gradient of an absent tensor yields the
// stand-in as well; the core says what is wrong with the rest.
inline NewTensor make_like_if(bool wanted, const TensorView& view, const TensorView& fallback) {
  return wanted && view.is_present() ? make_like(view) : make_absent(fallback.dtype, fallback.device);
}

}  // namespace kernel_pytorch::torch_ops
