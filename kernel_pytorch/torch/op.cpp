#include "kernel_pytorch/torch/op.h"

#include "kernel_pytorch/base/error.h"

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

TensorView Call::output_row_statistic(const TensorView& x) {
  const size_t leading_dimensions = x.rank > 0 ? static_cast<size_t>(x.rank - 1) : 0;
  const DType dtype = x.dtype == DType::kFloat64 ? DType::kFloat64 : DType::kFloat32;
  const TensorView statistic = output(x.shape().first(leading_dimensions), dtype);
  return contiguous_view(statistic.data, dtype, {statistic.element_count()}, statistic.device);
}

TensorView Call::output_like_if(bool wanted, const TensorView& view, const TensorView& fallback) {
  if (wanted && view.is_present()) return output_like(view);
  const int64_t no_elements[] = {0};
  output(no_elements, fallback.dtype);
  return {};
}

void Call::return_outputs(StableIValue* stack, uint64_t expected) {
  KP_INTERNAL_CHECK(output_count_ == expected, "an op made ", output_count_, " outputs, its schema has ", expected);
  for (size_t i = 0; i < output_count_; ++i) stack[i] = torch::stable::detail::from(outputs_[i]);
  output_count_ = 0;
}

Slot<std::vector<TensorView>>::Slot(const Boxed& boxed) {
  for (Handle handle : torch::stable::detail::to<std::vector<Handle>>(boxed.value)) tensors.emplace_back(handle);
}

std::vector<TensorView> Slot<std::vector<TensorView>>::get(Call& call, const SchemaArgument& argument,
                                                           const ArgumentName& name) {
  std::vector<TensorView> views;
  views.reserve(tensors.size());
  for (const Tensor& tensor : tensors) views.push_back(view_of(tensor, name, argument.is_written()));
  if (!views.empty()) call.found(views.front());
  return views;
}

// torch's own conversion to std::string (2.13) leaks a copy.
Slot<std::string>::Slot(const Boxed& boxed) {
  const auto handle = torch::stable::detail::to<StringHandle>(boxed.value);
  size_t length = 0;
  const char* data = nullptr;
  STABLE_TORCH_ERROR_CODE_CHECK(torch_string_length(handle, &length));
  STABLE_TORCH_ERROR_CODE_CHECK(torch_string_c_str(handle, &data));
  value.assign(data, length);
  STABLE_TORCH_ERROR_CODE_CHECK(torch_delete_string(handle));
}

}  // namespace kernel_pytorch::torch_ops
