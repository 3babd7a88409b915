#include "kernel_pytorch/torch/call.h"

#include <algorithm>

#include "kernel_pytorch/base/error.h"
#include "kernel_pytorch/base/overlap.h"

namespace kernel_pytorch::torch_ops {

Call::~Call() {
  for (size_t i = 0; i < output_count_; ++i) aoti_torch_delete_tensor_object(outputs_[i]);
}

TensorView Call::output(std::span<const int64_t> sizes, DType dtype) {
  return output(contiguous_view(nullptr, dtype, sizes));
}

TensorView Call::output(const TensorView& like) {
  KP_INTERNAL_CHECK(output_count_ < kMaxOutputs, "an op has more than ", kMaxOutputs, " outputs");
  NewTensor made = make_tensor(like, device_);
  outputs_[output_count_++] = made.tensor.release();
  return made.view;
}

void Call::fail_on_two_devices(const TensorView& view, const ArgumentName& name) const {
  fail(ErrorCode::kInvalidArgument, name, " is on ", view.device, ", ", ShortName{first_}, " is on ", device_,
       "; move all tensors to one device");
}

void Call::return_outputs(StableIValue* stack, uint64_t expected) {
  KP_INTERNAL_CHECK(output_count_ == expected, "an op made ", output_count_, " outputs, its schema has ", expected);
  for (size_t i = 0; i < output_count_; ++i) stack[i] = torch::stable::detail::from(outputs_[i]);
  output_count_ = 0;
}

void check_written_memory(std::string_view op, std::span<Memory> memories) {
  const auto name_of = [&](const Memory& memory) { return ArgumentName{op, memory.argument, memory.index}; };
  // By address: only neighbours can meet, and a list of thousands stays cheap.
  std::ranges::sort(memories, {}, &Memory::begin);
  for (auto one = memories.begin(); one != memories.end(); ++one) {
    const bool is_written = one->is_written;
    KP_CHECK(!is_written || !overlaps_itself(*one->view), name_of(*one), " is ", *one->view,
             ": several of its elements are one place in memory; the op writes into it, clone() it first");
    for (auto other = one + 1; other != memories.end() && other->begin < one->end; ++other) {
      if ((!is_written && !other->is_written) || !overlap(*one->view, *other->view)) continue;
      fail(ErrorCode::kInvalidArgument, name_of(is_written ? *one : *other), " shares memory with ",
           ShortName{name_of(is_written ? *other : *one)}, "; the op writes into it, clone() one of them first");
    }
  }
}

std::string text_of(StableIValue boxed) {
  const auto handle = torch::stable::detail::to<StringHandle>(boxed);
  size_t length = 0;
  const char* data = nullptr;
  STABLE_TORCH_ERROR_CODE_CHECK(torch_string_length(handle, &length));
  STABLE_TORCH_ERROR_CODE_CHECK(torch_string_c_str(handle, &data));
  std::string text(data, length);
  STABLE_TORCH_ERROR_CODE_CHECK(torch_delete_string(handle));
  return text;
}

}  // namespace kernel_pytorch::torch_ops
