#include "kernel_pytorch/base/tensor_view.h"

#include <algorithm>

#include "kernel_pytorch/base/error.h"

namespace kernel_pytorch {

TensorView contiguous_view(void* data, DType dtype, std::span<const int64_t> sizes, Device device) {
  KP_CHECK(sizes.size() <= kMaxRank, "tensor view: ", sizes.size(), " dimensions given, at most ", kMaxRank,
           " are supported; merge leading dimensions first");
  TensorView view{.data = data, .dtype = dtype, .device = device, .rank = static_cast<int8_t>(sizes.size())};
  int64_t stride = 1;
  for (int i = view.rank - 1; i >= 0; --i) {
    KP_CHECK(sizes[i] >= 0, "tensor view: dimension ", i, " has size ", sizes[i], "; sizes cannot be negative");
    view.sizes[i] = sizes[i];
    view.strides[i] = stride;
    KP_CHECK(!__builtin_mul_overflow(stride, std::max<int64_t>(sizes[i], 1), &stride), "tensor view: shape ",
             shape_text(sizes), " has more than 2^63 elements; check its sizes");
  }
  return view;
}

bool is_contiguous(const TensorView& view) {
  int64_t expected = 1;
  for (int i = view.rank - 1; i >= 0; --i) {
    if (view.sizes[i] == 1) continue;
    if (view.strides[i] != expected) return view.element_count() == 0;  // of an empty tensor no stride matters
    expected *= view.sizes[i];
  }
  return true;
}

int64_t span_elements(const TensorView& view) {
  if (view.element_count() == 0) return 0;
  int64_t last = 0;
  for (int i = 0; i < view.rank; ++i) last += (view.sizes[i] - 1) * view.strides[i];
  return last + 1;
}

std::string shape_text(std::span<const int64_t> sizes) {
  std::string text = "[";
  for (size_t i = 0; i < sizes.size(); ++i) {
    if (i > 0) text += ", ";
    text += std::to_string(sizes[i]);
  }
  return text + "]";
}

std::string to_string(const TensorView& view) {
  if (!view.is_present()) return "absent";
  std::string text = concat(view.dtype, shape_text(view.shape()));
  if (!is_contiguous(view)) {
    text += concat(" strides ", shape_text({view.strides.data(), static_cast<size_t>(view.rank)}));
  }
  return text + " on " + to_string(view.device);
}

}  // namespace kernel_pytorch
