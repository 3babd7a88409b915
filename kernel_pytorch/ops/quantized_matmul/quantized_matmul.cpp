#include "kernel_pytorch/ops/quantized_matmul/quantized_matmul.h"

#include "kernel_pytorch/base/error.h"
#include "kernel_pytorch/ops/quantized_matmul/operation.h"
#include "kernel_pytorch/ops/support/group_format/check.h"
#include "kernel_pytorch/ops/support/layer_check.h"
#include "kernel_pytorch/registry/choose.h"

namespace kernel_pytorch::quantized_matmul {

constexpr std::string_view kName = "quantized_matmul";

void check(Product& problem, Device device) {
  const GroupFormatCheck check{kName, device, problem.format, problem.group};
  check.check_device("x", problem.x);
  check.check_device("output", problem.output);
  KP_CHECK(problem.x.rank >= 1, kName, ": x has no dimensions; its last one is k");
  KP_CHECK(problem.codes.is_present() && problem.codes.rank == 2, kName, ": codes are ", problem.codes,
           "; they must be a matrix with a row for each output column");
  const int64_t n = problem.codes.sizes[0], k = problem.x.size(-1);
  check_rows(kName, "output", problem.output, problem.x, n);
  merge_rows(kName, "x", problem.x);
  merge_rows(kName, "output", problem.output);
  for (TensorView* view : {&problem.x, &problem.output}) {
    if (view->rank == 1) *view = contiguous_view(view->data, view->dtype, {1, view->sizes[0]}, view->device);
  }
  check.check_float_matrix("x", problem.x);
  check.check_float_matrix("output", problem.output);
  KP_CHECK(problem.output.dtype == problem.x.dtype, kName, ": output is ", problem.output.dtype, ", x is ",
           problem.x.dtype, "; they must have one type");
  check.check_matrix(problem.codes, problem.scales, problem.zeros, problem.tensor_scale, n, k);
  KP_CHECK(!group_format::is_integer(problem.format) || problem.scales.dtype == problem.x.dtype, kName, ": scales are ",
           problem.scales.dtype, ", x is ", problem.x.dtype, "; convert one of them");
  const TensorView& bias = problem.bias;
  if (!bias.is_present()) return;
  check.check_device("bias", bias);
  KP_CHECK((bias.dtype == problem.x.dtype || bias.dtype == DType::kFloat32) && bias.rank == 1 && bias.sizes[0] == n &&
               is_contiguous(bias),
           kName, ": bias is ", bias, "; it must be contiguous, ", problem.x.dtype, " or fp32, with ", n, " elements");
}

void multiply(const Product& arguments, Context& context) {
  Product problem = arguments;
  check(problem, context.device());
  registry::run_best(kProduct, problem, context);
}

}  // namespace kernel_pytorch::quantized_matmul
