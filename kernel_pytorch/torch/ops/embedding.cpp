// torch.ops.kernel_pytorch.embedding*: schemas and functions. Gradients, shape functions and batching rules are
// Python's (python/kernel_pytorch/_ops/embedding.py).
#include "kernel_pytorch/ops/embedding/embedding.h"

#include <array>

#include "kernel_pytorch/torch/op.h"

namespace kernel_pytorch::torch_ops {
namespace {

// `rows` and `padding_index` are the gradient's: the table itself is not kept for it.
void forward(Call& call, const ParameterView& indices, const TensorView& weight, int64_t, int64_t) {
  std::array<int64_t, kMaxRank + 1> sizes{};
  std::copy_n(indices.sizes.begin(), indices.rank, sizes.begin());
  sizes[indices.rank] = weight.rank > 0 ? weight.size(-1) : 1;
  const TensorView output = call.output({sizes.data(), static_cast<size_t>(indices.rank) + 1}, weight.dtype);
  embedding::forward({.indices = indices, .weight = weight, .output = output}, call.context());
}

void backward(Call& call, const TensorView& grad_output, const ParameterView& indices, int64_t rows,
              int64_t padding_index) {
  const int64_t sizes[] = {rows, grad_output.rank > 0 ? grad_output.size(-1) : 1};
  embedding::backward({.grad_output = grad_output,
                       .indices = indices,
                       .padding_index = padding_index,
                       .grad_weight = call.output(sizes, grad_output.dtype)},
                      call.context());
}

using Ops = OpList<
    Op<"embedding(Tensor indices, Tensor weight, SymInt rows, int padding_index) -> Tensor", forward>,
    Op<"embedding_forward(Tensor indices, Tensor weight, SymInt rows, int padding_index) -> Tensor", forward>,
    Op<"embedding_backward(Tensor grad_output, Tensor indices, SymInt rows, int padding_index) -> Tensor", backward>>;

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
