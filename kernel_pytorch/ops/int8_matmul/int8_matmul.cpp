#include "kernel_pytorch/ops/int8_matmul/int8_matmul.h"

#include "kernel_pytorch/base/error.h"
#include "kernel_pytorch/ops/int8_matmul/operation.h"
#include "kernel_pytorch/ops/support/layer_check.h"
#include "kernel_pytorch/registry/choose.h"

namespace kernel_pytorch::int8_matmul {
namespace {

constexpr std::string_view kName = "int8_matmul";

bool is_float(DType dtype) {
  return dtype == DType::kFloat32 || dtype == DType::kBFloat16 || dtype == DType::kFloat16;
}

struct ProductCheck {
  Device device;

  void check_tensor(std::string_view name, const TensorView& view) const {
    KP_CHECK(view.is_present(), kName, ": ", name, " is missing");
    KP_CHECK(view.device == device, kName, ": ", name, " is on ", view.device, ", the call runs on ", device,
             "; move all tensors to one device");
  }
  void check_scales(std::string_view name, const TensorView& view) const {
    check_tensor(name, view);
    KP_CHECK(view.dtype == DType::kFloat32 && is_contiguous(view), kName, ": ", name, " is ", view,
             "; it must be contiguous fp32");
  }
  void check_dense(std::string_view name, const TensorView& view) const {
    KP_CHECK(view.sizes[1] <= 1 || view.strides[1] == 1 || view.element_count() == 0, kName, ": ", name,
             " has strides ", shape_text({view.strides.data(), 2}), "; its last dimension must be dense");
  }
};

}  // namespace

void check(Product& problem, Device device) {
  const ProductCheck check{device};
  check.check_tensor("x", problem.x);
  check.check_tensor("weight", problem.weight);
  check.check_tensor("output", problem.output);
  KP_CHECK(problem.x.rank >= 1, kName, ": x has no dimensions; its last one is k");
  KP_CHECK(problem.weight.rank == 2 && problem.weight.dtype == DType::kInt8 && is_contiguous(problem.weight), kName,
           ": weight is ", problem.weight, "; it must be a contiguous int8 matrix [n, k]");
  const int64_t n = problem.weight.sizes[0], k = problem.weight.sizes[1];
  KP_CHECK(problem.x.size(-1) == k, kName, ": x has shape ", shape_text(problem.x.shape()), ", weight has ",
           shape_text(problem.weight.shape()), "; their last sizes must be equal");
  KP_CHECK(has_codes(problem) || is_float(problem.x.dtype), kName, ": x is ", problem.x.dtype,
           "; it must be int8, fp32, bf16 or fp16");
  check_rows(kName, "output", problem.output, problem.x, n);
  KP_CHECK(has_codes(problem) == problem.scale_x.is_present(), kName, ": x is ", problem.x.dtype, " and scale_x is ",
           problem.scale_x.is_present() ? "given" : "missing",
           "; int8 needs a scale for each row, other types are rounded with one of their own");
  merge_rows(kName, "x", problem.x);
  merge_rows(kName, "output", problem.output);
  for (TensorView* view : {&problem.x, &problem.output}) {
    if (view->rank == 1) *view = contiguous_view(view->data, view->dtype, {1, view->sizes[0]}, view->device);
  }
  check.check_dense("x", problem.x);
  check.check_dense("output", problem.output);
  KP_CHECK(is_float(problem.output.dtype), kName, ": output is ", problem.output.dtype,
           "; it must be fp32, bf16 or fp16");
  const int64_t m = problem.x.sizes[0];
  if (problem.scale_x.is_present()) {
    check.check_scales("scale_x", problem.scale_x);
    KP_CHECK(problem.scale_x.element_count() == m, kName, ": scale_x has ", problem.scale_x.element_count(),
             " elements, x has ", m, " rows; give one for each");
    problem.scale_x = contiguous_view(problem.scale_x.data, DType::kFloat32, {m}, problem.scale_x.device);
  }
  KP_CHECK(problem.group == 0 || problem.group == 32 || problem.group == 64 || problem.group == 128, kName,
           ": group is ", problem.group, "; it must be 32, 64 or 128, or 0 for one scale a row");
  check.check_scales("scale_weight", problem.scale_weight);
  const int64_t groups = problem.group == 0 ? 1 : (k + problem.group - 1) / problem.group;
  KP_CHECK(
      problem.scale_weight.rank == 2 && problem.scale_weight.sizes[0] == n && problem.scale_weight.sizes[1] == groups,
      kName, ": scale_weight has shape ", shape_text(problem.scale_weight.shape()), "; with group ", problem.group,
      " it must be [", n, ", ", groups, "]");
  const TensorView& bias = problem.bias;
  if (!bias.is_present()) return;
  check.check_tensor("bias", bias);
  KP_CHECK((bias.dtype == problem.output.dtype || bias.dtype == DType::kFloat32) && bias.rank == 1 &&
               bias.sizes[0] == n && is_contiguous(bias),
           kName, ": bias is ", bias, "; it must be contiguous, ", problem.output.dtype, " or fp32, with ", n,
           " elements");
}

void multiply(const Product& arguments, Context& context) {
  Product problem = arguments;
  check(problem, context.device());
  registry::run_best(kProduct, problem, context);
}

}  // namespace kernel_pytorch::int8_matmul
