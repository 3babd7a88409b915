#include "kernel_pytorch/ops/merge_attention/merge_attention.h"

#include <algorithm>

#include "kernel_pytorch/base/error.h"
#include "kernel_pytorch/ops/merge_attention/operation.h"
#include "kernel_pytorch/registry/choose.h"

namespace kernel_pytorch::merge_attention {
namespace {

void check_device(std::string_view name, const TensorView& view, Device device) {
  KP_CHECK(view.is_present(), "merge_attention: ", name, " is missing");
  KP_CHECK(view.device == device, "merge_attention: ", name, " is on ", view.device, ", the call runs on ", device,
           "; move all tensors to one device");
}

void check_output(std::string_view name, const TensorView& view, const TensorView& first, Device device) {
  check_device(name, view, device);
  KP_CHECK(view.dtype == first.dtype, "merge_attention: ", name, " is ", view.dtype, ", output1 is ", first.dtype,
           "; convert one of them");
  KP_CHECK(std::ranges::equal(view.shape(), first.shape()), "merge_attention: ", name, " has shape ",
           shape_text(view.shape()), ", output1 has ", shape_text(first.shape()), "; they must be equal");
  KP_CHECK(view.sizes[2] <= 1 || view.strides[2] == 1, "merge_attention: ", name, " has strides ",
           shape_text({view.strides.data(), 3}), "; its last dimension must be dense");
}

void check_lse(std::string_view name, const TensorView& view, const TensorView& first, Device device) {
  check_device(name, view, device);
  KP_CHECK(view.dtype == DType::kFloat32, "merge_attention: ", name, " is ", view.dtype, "; it must be fp32");
  KP_CHECK(view.rank == 2 && view.sizes[0] == first.sizes[1] && view.sizes[1] == first.sizes[0],
           "merge_attention: ", name, " has shape ", shape_text(view.shape()), ", output1 has ",
           shape_text(first.shape()), "; it must be [heads, tokens]");
}

}  // namespace

void check(const Merge& problem, Device device) {
  const TensorView& first = problem.output1;
  check_device("output1", first, device);
  KP_CHECK(first.dtype == DType::kFloat32 || first.dtype == DType::kBFloat16 || first.dtype == DType::kFloat16,
           "merge_attention: output1 is ", first.dtype, "; convert it to fp32, bf16 or fp16");
  KP_CHECK(first.rank == 3, "merge_attention: output1 has shape ", shape_text(first.shape()),
           "; it must be [tokens, heads, size]");
  check_output("output1", first, first, device);
  check_output("output2", problem.output2, first, device);
  check_output("output", problem.output, first, device);
  check_lse("lse1", problem.lse1, first, device);
  check_lse("lse2", problem.lse2, first, device);
  if (problem.lse.is_present()) check_lse("lse", problem.lse, first, device);
}

void merge(const Merge& arguments, Context& context) {
  check(arguments, context.device());
  registry::run_best(kMerge, arguments, context);
}

}  // namespace kernel_pytorch::merge_attention
