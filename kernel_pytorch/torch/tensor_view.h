// The only conversion between torch's tensors and ours. An input becomes a view with torch's own strides, so
// transposed, sliced and expanded tensors are not copied, but where kernels want them dense; an output is a new
// contiguous tensor together with its view. Limits: kMaxRank dimensions, and the element types of base/dtype.h.
#pragma once

#include <torch/csrc/inductor/aoti_torch/c/shim.h>

#include <optional>
#include <span>
#include <utility>

#include "kernel_pytorch/base/tensor_view.h"
#include "kernel_pytorch/torch/argument_name.h"

namespace kernel_pytorch::torch_ops {

// What torch passes for Tensor and Tensor?, owned by the function called.
using Handle = AtenTensorHandle;
using OptionalHandle = std::optional<AtenTensorHandle>;

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
  Handle release() { return std::exchange(handle_, nullptr); }

 private:
  Handle handle_;
};

// `name` is what errors call the argument where torch's tensor has no counterpart here. A tensor that the op writes
// into must say so: torch then gives it memory of its own.
TensorView view_of(const Tensor& tensor, const ArgumentName& name, bool is_written = false);

// A small tensor that kernels want without strides. In the rare case of strides `tensor` is replaced by a contiguous
// copy.
TensorView parameter_view_of(Tensor& tensor, const ArgumentName& name);

// The same where only the last dimension must be dense.
TensorView dense_view_of(Tensor& tensor, const ArgumentName& name);

// The same as [batch, rows, columns], where one of the last two strides must be 1 and the leading dimensions must
// merge.
TensorView matrix_view_of(Tensor& tensor, const ArgumentName& name);

// The same as [rows, columns], where the last stride must be 1 and the leading dimensions must merge.
TensorView rows_view_of(Tensor& tensor, const ArgumentName& name);

// The type that is torch's `number`.
DType dtype_of(int32_t number, const ArgumentName& name);

struct NewTensor {
  Tensor tensor;
  TensorView view;
};

// Uninitialised, with the sizes, strides and type of `like`, from torch's allocator. Throws kDevice, naming the bytes,
// when there is no memory.
NewTensor make_tensor(const TensorView& like, Device device);

}  // namespace kernel_pytorch::torch_ops
