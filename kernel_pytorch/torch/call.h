// One call of an op of torch: its outputs, its context, and the memory that it writes.
#pragma once

#include <torch/csrc/stable/library.h>

#include <array>
#include <optional>
#include <string>

#include "kernel_pytorch/torch/border.h"
#include "kernel_pytorch/torch/context.h"
#include "kernel_pytorch/torch/tensor_view.h"

namespace kernel_pytorch::torch_ops {

// What a call makes besides computing: its outputs, uninitialised and contiguous on the call's device, and its context.
// The device is that of all tensors given.
class Call {
 public:
  Call() = default;
  Call(const Call&) = delete;
  Call& operator=(const Call&) = delete;
  ~Call();

  TensorView output(std::span<const int64_t> sizes, DType dtype);
  TensorView output(const TensorView& like);  // its sizes, strides and type

  Context& context() { return context_ ? *context_ : context_.emplace(device_); }

  // Throws where the tensors of a call are on several devices.
  void found(const TensorView& view, const ArgumentName& name) {
    if (!view.is_present()) return;
    if (first_.argument.empty()) device_ = view.device, first_ = name;
    if (view.device != device_) [[unlikely]]
      fail_on_two_devices(view, name);
  }
  void return_outputs(StableIValue* stack, uint64_t expected);

 private:
  [[noreturn]] void fail_on_two_devices(const TensorView& view, const ArgumentName& name) const;

  static constexpr size_t kMaxOutputs = 12;
  Device device_;
  ArgumentName first_;  // the argument whose device it is
  std::optional<TorchContext> context_;
  std::array<Handle, kMaxOutputs> outputs_{};
  size_t output_count_ = 0;
};

// The memory of a tensor of a call: of an argument, or of an entry of one that is a list.
struct Memory {
  uintptr_t begin;
  uintptr_t end;
  const TensorView* view;
  std::string_view argument;
  bool is_written;
  int64_t index;  // in its list, or -1
};

// Nothing where the tensor has no elements.
inline std::optional<Memory> memory_of(const TensorView& view, std::string_view argument, bool is_written,
                                       int64_t index = -1) {
  const int64_t elements = span_elements(view);
  if (elements == 0) return std::nullopt;
  const auto begin = reinterpret_cast<uintptr_t>(view.data);
  return Memory{begin, begin + static_cast<uintptr_t>(elements * size_of(view.dtype)), &view, argument, is_written,
                index};
}

// Throws where memory that the op writes belongs to a second element or to a second tensor of the call: a kernel
// promises nothing there, not even for equal views. Sorts what it is given.
void check_written_memory(std::string_view op, std::span<Memory> memories);

// Takes the text off the stack; torch's own conversion to std::string (2.13) leaks a copy.
std::string text_of(StableIValue value);

}  // namespace kernel_pytorch::torch_ops
