#include "kernel_pytorch/ops/sparse_matmul/sparse_matmul.h"

#include "kernel_pytorch/base/error.h"
#include "kernel_pytorch/ops/sparse_compress/sparse_compress.h"
#include "kernel_pytorch/ops/sparse_matmul/operation.h"
#include "kernel_pytorch/ops/support/layer_check.h"
#include "kernel_pytorch/registry/choose.h"

namespace kernel_pytorch::sparse_matmul {
namespace {

constexpr std::string_view kName = "sparse_matmul";

void check_matrix(std::string_view name, const TensorView& view, Device device) {
  const bool is_small =
      view.dtype == DType::kFloat32 || view.dtype == DType::kBFloat16 || view.dtype == DType::kFloat16;
  KP_CHECK(view.device == device, kName, ": ", name, " is on ", view.device, ", the call runs on ", device,
           "; move one of them");
  KP_CHECK(is_small && (view.sizes[1] <= 1 || view.strides[1] == 1 || view.element_count() == 0), kName, ": ", name,
           " is ", view, "; it must be fp32, bf16 or fp16 with dense columns");
}

}  // namespace

void check(Product& problem, Device device) {
  KP_CHECK(problem.x.rank >= 1, kName, ": x has no dimensions; its last one is k");
  KP_CHECK(problem.values.rank == 2, kName, ": values are ", problem.values, "; they must be a matrix [n, k / 2]");
  const int64_t n = problem.values.sizes[0], k = problem.x.size(-1);
  KP_CHECK(k % sparse_compress::kGroup == 0, kName, ": k is ", k,
           "; two of each four are kept, so it must be a multiple of 4");
  check_rows(kName, "output", problem.output, problem.x, n);
  merge_rows(kName, "x", problem.x);
  merge_rows(kName, "output", problem.output);
  for (TensorView* view : {&problem.x, &problem.output}) {
    if (view->rank == 1) *view = contiguous_view(view->data, view->dtype, {1, view->sizes[0]}, view->device);
  }
  check_matrix("x", problem.x, device);
  check_matrix("output", problem.output, device);
  sparse_compress::check_compressed(kName, problem.values, problem.metadata, n, k, device);
  KP_CHECK(problem.output.dtype == problem.x.dtype && problem.values.dtype == problem.x.dtype, kName, ": x is ",
           problem.x.dtype, ", values are ", problem.values.dtype, ", output is ", problem.output.dtype,
           "; they must have one type");
  const TensorView& bias = problem.bias;
  if (!bias.is_present()) return;
  KP_CHECK(bias.device == device, kName, ": bias is on ", bias.device, ", the call runs on ", device,
           "; move one of them");
  KP_CHECK((bias.dtype == problem.x.dtype || bias.dtype == DType::kFloat32) && bias.rank == 1 && bias.sizes[0] == n &&
               is_contiguous(bias),
           kName, ": bias is ", bias, "; it must be contiguous, ", problem.x.dtype, " or fp32, with ", n, " elements");
}

void multiply(const Product& arguments, Context& context) {
  Product problem = arguments;
  check(problem, context.device());
  registry::run_best(kProduct, problem, context);
}

}  // namespace kernel_pytorch::sparse_matmul
