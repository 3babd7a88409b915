// The only conversion between torch's tensors and ours. An input becomes a view with torch's own strides, so
// transposed, sliced and expanded tensors are never copied; an output is a new contiguous tensor together with its
// view. Limits: kMaxRank dimensions, and the element types of base/dtype.h.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <optional>
#include <span>
#include <string_view>

#include "kernel_pytorch/base/tensor_view.h"

namespace kernel_pytorch::torch_ops {

using torch::stable::Tensor;

// `argument` ("rms_norm: x") is named in the error where torch's tensor has no counterpart here.
TensorView view_of(const Tensor& tensor, std::string_view argument);
inline TensorView view_of(const std::optional<Tensor>& tensor, std::string_view argument) {
  return tensor ? view_of(*tensor, argument) : TensorView{};
}

struct NewTensor {
  Tensor tensor;
  TensorView view;
};

// Contiguous and uninitialised, from torch's allocator. Throws kDevice, naming the bytes, when there is no memory.
NewTensor make_tensor(std::span<const int64_t> sizes, DType dtype, Device device);

// What stands for an output that was not asked for: no elements and an absent view.
NewTensor make_absent(DType dtype, Device device);

// Small tensors that kernels want without strides: parameters as they are, statistics (one number per row) as [rows].
// In the rare case of strides `tensor` is replaced by a contiguous copy.
TensorView parameter_view_of(std::optional<Tensor>& tensor, std::string_view argument);
TensorView row_view_of(Tensor& tensor, std::string_view argument);

}  // namespace kernel_pytorch::torch_ops
