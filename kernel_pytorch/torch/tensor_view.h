// The only conversion between torch's tensors and ours. An input becomes a view with torch's own strides, so
// transposed, sliced and expanded tensors are never copied; an output is a new contiguous tensor together with its
// view. Limits: kMaxRank dimensions, and the element types of base/dtype.h.
#pragma once

#include <torch/csrc/inductor/aoti_torch/c/shim.h>

#include <optional>
#include <span>
#include <string_view>
#include <utility>

#include "kernel_pytorch/base/tensor_view.h"

namespace kernel_pytorch::torch_ops {

// What TORCH_BOX passes for Tensor and Tensor?, owned by the function called, and what it takes for a Tensor returned
// (a struct, since it has two ways to box a bare handle).
using Handle = AtenTensorHandle;
using OptionalHandle = std::optional<AtenTensorHandle>;
struct Returned {
  Handle handle;
};

// Owns a handle, or none for an optional tensor that was not given. Half the cost of torch::stable::Tensor, whose
// shared ownership takes an allocation for every argument and another handle for every result.
class Tensor {
 public:
  explicit Tensor(Handle handle) : handle_(handle) {}
  explicit Tensor(OptionalHandle handle) : handle_(handle.value_or(nullptr)) {}
  Tensor(Tensor&& other) noexcept : handle_(std::exchange(other.handle_, nullptr)) {}
  Tensor& operator=(Tensor&& other) noexcept {
    std::swap(handle_, other.handle_);
    return *this;
  }
  ~Tensor() {
    if (handle_ != nullptr) aoti_torch_delete_tensor_object(handle_);
  }
  Handle get() const { return handle_; }
  Returned release() { return {std::exchange(handle_, nullptr)}; }

 private:
  Handle handle_;
};

// `argument` ("rms_norm: x") is named in the error where torch's tensor has no counterpart here.
TensorView view_of(const Tensor& tensor, std::string_view argument);

// Small tensors that kernels want without strides: parameters as they are, statistics (one number per row) as [rows].
// In the rare case of strides `tensor` is replaced by a contiguous copy.
TensorView parameter_view_of(Tensor& tensor, std::string_view argument);
TensorView row_view_of(Tensor& tensor, std::string_view argument);

struct NewTensor {
  Tensor tensor;
  TensorView view;
};

// Contiguous and uninitialised, from torch's allocator. Throws kDevice, naming the bytes, when there is no memory.
NewTensor make_tensor(std::span<const int64_t> sizes, DType dtype, Device device);

// What stands for an output that was not asked for: no elements and an absent view.
NewTensor make_absent(DType dtype, Device device);

}  // namespace kernel_pytorch::torch_ops
