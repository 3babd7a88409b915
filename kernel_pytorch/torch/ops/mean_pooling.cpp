// torch.ops.kernel_pytorch.mean_pool* and chunk_mean_pool*: schemas and functions. Gradients and shape functions are
// Python's (python/kernel_pytorch/_ops/mean_pooling.py).
#include "kernel_pytorch/ops/mean_pooling/mean_pooling.h"

#include <vector>

#include "kernel_pytorch/base/error.h"
#include "kernel_pytorch/torch/op.h"

namespace kernel_pytorch::torch_ops {
namespace {

// Sizes of x with `means` for its tokens, or the reverse. Without offsets the tokens come second, after the batch.
std::vector<int64_t> sizes_of(const TensorView& view, size_t at, std::vector<int64_t> instead) {
  std::vector<int64_t> sizes(view.shape().begin(), view.shape().end());
  sizes.erase(sizes.begin() + static_cast<int64_t>(at));
  sizes.insert(sizes.begin() + static_cast<int64_t>(at), instead.begin(), instead.end());
  return sizes;
}

// `tokens` is the gradient's: x itself is not kept for it.
void forward(Call& call, const TensorView& x, const ParameterView& offsets, int64_t) {
  KP_CHECK(x.rank > (offsets.is_present() ? 1 : 2), "mean_pool: x has shape ", shape_text(x.shape()), "; it must be ",
           offsets.is_present() ? "[tokens, ..., columns]" : "[batch, tokens, ..., columns]");
  const std::vector<int64_t> sizes =
      offsets.is_present() ? sizes_of(x, 0, {std::max<int64_t>(offsets.element_count() - 1, 0)}) : sizes_of(x, 1, {});
  mean_pooling::forward({.x = x, .offsets = offsets, .output = call.output(sizes, x.dtype)}, call.context());
}

void backward(Call& call, const ParameterView& grad_output, const ParameterView& offsets, int64_t tokens) {
  KP_CHECK(grad_output.rank > 0, "mean_pool backward: grad_output has no dimensions");
  std::vector<int64_t> sizes(grad_output.shape().begin(), grad_output.shape().end());
  if (offsets.is_present()) {
    sizes[0] = tokens;
  } else {
    sizes.insert(sizes.begin() + 1, tokens);
  }
  mean_pooling::backward(
      {.grad_output = grad_output, .offsets = offsets, .grad_input = call.output(sizes, grad_output.dtype)},
      call.context());
}

void chunk_forward(Call& call, const TensorView& x, int64_t chunk_size, int64_t) {
  KP_CHECK(x.rank > 2, "chunk_mean_pool: x has shape ", shape_text(x.shape()),
           "; it must be [batch, tokens, ..., columns]");
  KP_CHECK(chunk_size > 0, "chunk_mean_pool: chunk_size is ", chunk_size, "; it must be at least 1");
  const std::vector<int64_t> sizes = sizes_of(x, 1, {x.sizes[1] / chunk_size + (x.sizes[1] % chunk_size != 0)});
  mean_pooling::forward({.x = x, .chunk_size = chunk_size, .output = call.output(sizes, x.dtype)}, call.context());
}

void chunk_backward(Call& call, const ParameterView& grad_output, int64_t chunk_size, int64_t tokens) {
  KP_CHECK(grad_output.rank > 1, "chunk_mean_pool backward: grad_output has shape ", shape_text(grad_output.shape()),
           "; it must be [batch, chunks, ..., columns]");
  const std::vector<int64_t> sizes = sizes_of(grad_output, 1, {tokens});
  mean_pooling::backward(
      {.grad_output = grad_output, .chunk_size = chunk_size, .grad_input = call.output(sizes, grad_output.dtype)},
      call.context());
}

using Ops =
    OpList<Op<"mean_pool(Tensor x, Tensor? offsets, SymInt tokens) -> Tensor", forward>,
           Op<"mean_pool_forward(Tensor x, Tensor? offsets, SymInt tokens) -> Tensor", forward>,
           Op<"mean_pool_backward(Tensor grad_output, Tensor? offsets, SymInt tokens) -> Tensor", backward>,
           Op<"chunk_mean_pool(Tensor x, int chunk_size, SymInt tokens) -> Tensor", chunk_forward>,
           Op<"chunk_mean_pool_forward(Tensor x, int chunk_size, SymInt tokens) -> Tensor", chunk_forward>,
           Op<"chunk_mean_pool_backward(Tensor grad_output, int chunk_size, SymInt tokens) -> Tensor", chunk_backward>>;

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
