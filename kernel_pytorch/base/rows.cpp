#include "kernel_pytorch/base/rows.h"

#include <algorithm>

namespace kernel_pytorch {
namespace {

bool can_merge(std::span<TensorView*> views, int outer) {
  return std::ranges::all_of(views, [&](const TensorView* view) {
    return !view->is_present() || view->strides[outer] == view->sizes[outer + 1] * view->strides[outer + 1];
  });
}

void remove_dimension(TensorView& view, int dimension) {
  for (int i = dimension; i + 1 < view.rank; ++i) {
    view.sizes[i] = view.sizes[i + 1];
    view.strides[i] = view.strides[i + 1];
  }
  --view.rank;
}

void for_present(std::span<TensorView*> views, auto&& change) {
  for (TensorView* view : views) {
    if (view->is_present()) change(*view);
  }
}

}  // namespace

void merge_leading_dimensions(std::span<TensorView*> views) {
  TensorView& first = *views.front();
  if (first.rank == 1) {  // a lone row
    for_present(views, [](TensorView& view) {
      view.rank = 2;
      view.sizes[1] = view.sizes[0];
      view.strides[1] = view.strides[0];
      view.sizes[0] = 1;
      view.strides[0] = view.sizes[1] * view.strides[1];
    });
    return;
  }
  if (first.rank == 2) return;
  if (first.element_count() == 0) {  // strides mean nothing
    const int64_t rows = rows_of(first), columns = columns_of(first);
    for_present(views, [&](TensorView& view) {
      view = contiguous_view(view.data, view.dtype, {rows, columns}, view.device);
    });
    return;
  }
  for (int i = first.rank - 2; i >= 0 && first.rank > 2; --i) {
    if (first.sizes[i] == 1) for_present(views, [&](TensorView& view) { remove_dimension(view, i); });
  }
  for (int i = first.rank - 3; i >= 0; --i) {
    if (!can_merge(views, i)) continue;
    for_present(views, [&](TensorView& view) {
      view.sizes[i + 1] *= view.sizes[i];
      remove_dimension(view, i);
    });
  }
}

bool merge_front(TensorView& view, int kept) {
  int64_t size = 1, stride = 0;
  for (int i = view.rank - kept - 1; i >= 0; --i) {
    if (view.sizes[i] == 1) continue;
    if (size != 1 && view.strides[i] != size * stride && view.element_count() > 0) return false;
    if (size == 1) stride = view.strides[i];
    size *= view.sizes[i];
  }
  TensorView merged = view;
  merged.rank = static_cast<int8_t>(kept + 1);
  merged.sizes[0] = size;
  merged.strides[0] = stride;
  for (int i = 0; i < kept; ++i) {
    merged.sizes[i + 1] = view.size(i - kept);
    merged.strides[i + 1] = view.stride(i - kept);
  }
  view = merged;
  return true;
}

}  // namespace kernel_pytorch
