// torch.ops.kernel_pytorch.matmul*: products of matrices and batches of them. Gradients, which are products too, shape
// functions and batching rules are Python's (python/kernel_pytorch/_ops/matmul.py).
#include "kernel_pytorch/ops/matmul/matmul.h"

#include <vector>

#include "kernel_pytorch/base/error.h"
#include "kernel_pytorch/torch/op.h"

namespace kernel_pytorch::torch_ops {
namespace {

// a [..., m, k] and b [..., k, n] of the same leading sizes.
void forward(Call& call, const MatrixView& a, const MatrixView& b, const std::string& precision) {
  KP_CHECK(a.given.rank >= 2 && a.given.rank == b.given.rank, "matmul: a has shape ", shape_text(a.given.shape()),
           ", b has ", shape_text(b.given.shape()), "; they must have equally many dimensions, at least two");
  std::vector<int64_t> sizes(a.given.shape().begin(), a.given.shape().end());
  for (size_t i = 0; i + 2 < sizes.size(); ++i) {
    KP_CHECK(sizes[i] == b.given.sizes[i], "matmul: a has shape ", shape_text(a.given.shape()), ", b has ",
             shape_text(b.given.shape()), "; their leading sizes must be equal (expand them first)");
  }
  sizes.back() = b.given.size(-1);
  TensorView output = call.output(sizes, a.dtype);
  output = contiguous_view(output.data, output.dtype, {a.sizes[0], a.sizes[1], b.sizes[2]}, output.device);
  matmul::multiply({.a = a, .b = b, .precision = matmul::precision_of(precision), .output = output}, call.context());
}

// output += alpha * a b, of matrices: how gradients are added up over pieces.
void accumulate(Call& call, const TensorView& output, const MatrixView& a, const MatrixView& b, double alpha) {
  KP_CHECK(output.rank == 2 && a.given.rank == 2 && b.given.rank == 2, "matmul_add_: output, a and b are ", output,
           ", ", a.given, ", ", b.given, "; they must have two dimensions");
  TensorView lifted = output;
  lifted.rank = 3;
  lifted.sizes = {1, output.sizes[0], output.sizes[1]};
  lifted.strides = {0, output.strides[0], output.strides[1]};
  matmul::multiply({.a = a, .b = b, .alpha = alpha, .residual = lifted, .output = lifted}, call.context());
}

using Ops = OpList<Op<"matmul(Tensor a, Tensor b, str precision) -> Tensor", forward>,
                   Op<"matmul_forward(Tensor a, Tensor b, str precision) -> Tensor", forward>,
                   Op<"matmul_add_(Tensor(a!) output, Tensor a, Tensor b, float alpha) -> ()", accumulate>>;

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(kernel_pytorch, library) {
  Ops::define(library);
}
STABLE_TORCH_LIBRARY_IMPL(kernel_pytorch, CPU, library) {
  Ops::implement(library);
}
STABLE_TORCH_LIBRARY_IMPL(kernel_pytorch, CUDA, library) {
  Ops::implement(library);
}

}  // namespace kernel_pytorch::torch_ops
