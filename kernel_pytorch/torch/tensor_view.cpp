#include "kernel_pytorch/torch/tensor_view.h"

#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <array>

#include "kernel_pytorch/base/error.h"
#include "kernel_pytorch/base/rows.h"

namespace kernel_pytorch::torch_ops {
namespace {

bool is_matrix(TensorView& view) {
  const bool is_dense = view.size(-1) <= 1 || view.stride(-1) == 1 || view.size(-2) <= 1 || view.stride(-2) == 1;
  return merge_front(view, 2) && is_dense;
}
bool are_rows(TensorView& view) {
  const bool is_dense = view.size(-1) <= 1 || view.stride(-1) == 1;
  return merge_front(view, 1) && is_dense;
}

// torch's numbers for our types, in the order of DType. They are asked for and not copied from a header: the stable ABI
// promises the functions, not the values.
const std::array<int32_t, kDTypeCount>& torch_dtypes() {
  static const std::array<int32_t, kDTypeCount> kNumbers = {
      aoti_torch_dtype_float32(), aoti_torch_dtype_float64(),       aoti_torch_dtype_bfloat16(),
      aoti_torch_dtype_float16(), aoti_torch_dtype_float8_e4m3fn(), aoti_torch_dtype_float8_e5m2(),
      aoti_torch_dtype_int8(),    aoti_torch_dtype_int32(),         aoti_torch_dtype_int64(),
      aoti_torch_dtype_bool()};
  return kNumbers;
}

DType dtype_of(const Tensor& tensor, const ArgumentName& name) {
  int32_t number = -1;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(tensor.get(), &number));
  return dtype_of(number, name);
}

Device device_of(const Tensor& tensor, const ArgumentName& name) {
  static const int32_t kCpu = aoti_torch_device_type_cpu();
  static const int32_t kCuda = aoti_torch_device_type_cuda();
  int32_t type = -1;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(tensor.get(), &type));
  if (type == kCpu) return {};
  KP_CHECK(type == kCuda, name, " is on a device of torch's type ", type, "; only cpu and cuda have kernels");
  int32_t index = 0;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_index(tensor.get(), &index));
  return {DeviceKind::kCuda, static_cast<int16_t>(index)};
}

// Sizes and strides stay when a storage is freed (untyped_storage().resize_(0), as FSDP does between uses of a
// parameter); the address is then null, or just above it.
void check_storage(const Tensor& tensor, const TensorView& view, const ArgumentName& name) {
  int64_t bytes = 0, offset = 0;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_storage_size(tensor.get(), &bytes));
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_storage_offset(tensor.get(), &offset));
  const int64_t elements = span_elements(view);
  const int64_t needed = elements == 0 ? 0 : (offset + elements) * size_of(view.dtype);
  KP_CHECK(needed <= bytes, name, " is ", view, " and needs ", needed, " bytes, its storage has ", bytes,
           "; it was freed or resized, give it memory again before the call");
}

Tensor contiguous_copy(const Tensor& tensor) {
  Handle shared = nullptr;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_new_tensor_handle(tensor.get(), &shared));
  const torch::stable::Tensor copy = torch::stable::contiguous(torch::stable::Tensor(shared));
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_new_tensor_handle(copy.get(), &shared));
  return Tensor(shared);
}

}  // namespace

DType dtype_of(int32_t number, const ArgumentName& name) {
  const auto& numbers = torch_dtypes();
  const auto found = std::find(numbers.begin(), numbers.end(), number);
  KP_CHECK(found != numbers.end(), name, " has an element type that no kernel takes (torch's number ", number,
           "); convert it to fp32, bf16 or fp16 first");
  return static_cast<DType>(found - numbers.begin());
}

TensorView view_of(const Tensor& tensor, const ArgumentName& name, bool is_written) {
  if (tensor.get() == nullptr) return {};
  int64_t rank = 0;
  int64_t* sizes = nullptr;
  int64_t* strides = nullptr;
  const void* data = nullptr;
  void* written_data = nullptr;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_dim(tensor.get(), &rank));
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_sizes(tensor.get(), &sizes));
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_strides(tensor.get(), &strides));
  STABLE_TORCH_ERROR_CODE_CHECK(is_written ? torch_get_mutable_data_ptr(tensor.get(), &written_data)
                                           : torch_get_const_data_ptr(tensor.get(), &data));
  KP_CHECK(rank <= kMaxRank, name, " has ", rank, " dimensions, at most ", kMaxRank,
           " are supported; merge leading dimensions first, e.g. with flatten(0, 1)");
  TensorView view{.data = is_written ? written_data : const_cast<void*>(data),
                  .dtype = dtype_of(tensor, name),
                  .device = device_of(tensor, name),
                  .rank = static_cast<int8_t>(rank)};
  std::copy_n(sizes, rank, view.sizes.begin());
  std::copy_n(strides, rank, view.strides.begin());
  check_storage(tensor, view, name);
  return view;
}

NewTensor make_tensor(const TensorView& like, Device device) {
  TensorView view = like;
  view.device = device;
  const bool on_cpu = device.kind == DeviceKind::kCpu;
  AtenTensorHandle handle = nullptr;
  const AOTITorchError status = aoti_torch_empty_strided(
      view.rank, view.sizes.data(), view.strides.data(), torch_dtypes()[static_cast<int>(like.dtype)],
      on_cpu ? aoti_torch_device_type_cpu() : aoti_torch_device_type_cuda(), on_cpu ? -1 : device.index, &handle);
  if (status != TORCH_SUCCESS) {
    fail(ErrorCode::kDevice, "kernel_pytorch: torch could not allocate ", view.byte_count(), " bytes on ", device,
         " (out of memory?); free memory or use a smaller batch");
  }
  Tensor tensor(handle);
  STABLE_TORCH_ERROR_CODE_CHECK(torch_get_mutable_data_ptr(handle, &view.data));
  return {std::move(tensor), view};
}

TensorView parameter_view_of(Tensor& tensor, const ArgumentName& name) {
  const TensorView view = view_of(tensor, name);
  if (!view.is_present() || is_contiguous(view)) return view;
  tensor = contiguous_copy(tensor);
  return view_of(tensor, name);
}

TensorView dense_view_of(Tensor& tensor, const ArgumentName& name) {
  const TensorView view = view_of(tensor, name);
  if (view.rank <= 0 || view.size(-1) <= 1 || view.stride(-1) == 1) return view;
  tensor = contiguous_copy(tensor);
  return view_of(tensor, name);
}

namespace {

// A view that `merges` brings to its form, of a contiguous copy where it does not; of fewer dimensions as it is.
TensorView merged_view_of(Tensor& tensor, const ArgumentName& name, int least_rank, bool (*merges)(TensorView&)) {
  TensorView view = view_of(tensor, name);
  if (view.rank < least_rank || merges(view)) return view;
  tensor = contiguous_copy(tensor);
  view = view_of(tensor, name);
  merges(view);
  return view;
}

}  // namespace

TensorView matrix_view_of(Tensor& tensor, const ArgumentName& name) {
  return merged_view_of(tensor, name, 2, is_matrix);
}

TensorView rows_view_of(Tensor& tensor, const ArgumentName& name) {
  return merged_view_of(tensor, name, 1, are_rows);
}

}  // namespace kernel_pytorch::torch_ops
