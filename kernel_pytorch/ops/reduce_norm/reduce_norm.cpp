#include "kernel_pytorch/ops/reduce_norm/reduce_norm.h"

#include <algorithm>

#include "kernel_pytorch/base/error.h"
#include "kernel_pytorch/ops/reduce_norm/operation.h"
#include "kernel_pytorch/ops/support/tensor_list.h"
#include "kernel_pytorch/registry/choose.h"

namespace kernel_pytorch::reduce_norm {
namespace {

bool is_norm_type(DType dtype) {
  return dtype == DType::kFloat32 || dtype == DType::kBFloat16 || dtype == DType::kFloat16 || dtype == DType::kFloat64;
}

void check_tensor(const TensorView& tensor, size_t index, Device device) {
  KP_CHECK(tensor.device == device, "reduce_norm: tensor ", index, " is on ", tensor.device, ", the call runs on ",
           device, "; take the norm of each device's tensors by itself");
  KP_CHECK(is_norm_type(tensor.dtype), "reduce_norm: tensor ", index, " is ", tensor.dtype,
           "; convert it to fp32, bf16, fp16 or fp64");
  KP_CHECK(tensor.dtype != DType::kFloat64 || device.kind == DeviceKind::kCpu, "reduce_norm: tensor ", index,
           " is fp64 on ", device, "; fp64 is supported on the CPU only, convert it to fp32");
  KP_CHECK(is_dense(tensor), "reduce_norm: tensor ", index, " has shape ", shape_text(tensor.shape()), " and strides ",
           shape_text({tensor.strides.data(), static_cast<size_t>(tensor.rank)}),
           ", which leave gaps or overlap; make it contiguous");
}

}  // namespace

void check(const Norm& arguments, Device device) {
  bool any_double = false;
  for (size_t i = 0; i < arguments.tensors.size(); ++i) {
    check_tensor(arguments.tensors[i], i, device);
    any_double |= arguments.tensors[i].dtype == DType::kFloat64;
  }
  const DType wanted = any_double ? DType::kFloat64 : DType::kFloat32;
  const TensorView& output = arguments.output;
  KP_CHECK(output.is_present() && output.element_count() == 1, "reduce_norm: output has ", output.element_count(),
           " elements; it must have one");
  KP_CHECK(output.dtype == wanted, "reduce_norm: output is ", output.dtype, "; it must be ", wanted);
  KP_CHECK(output.device == device, "reduce_norm: output is on ", output.device, ", the call runs on ", device,
           "; move it there");
}

void norm(const Norm& arguments, Context& context) {
  check(arguments, context.device());
  registry::run_best(kNorm, arguments, context);
}

}  // namespace kernel_pytorch::reduce_norm
