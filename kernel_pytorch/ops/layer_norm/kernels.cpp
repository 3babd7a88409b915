// The kernels of layer_norm, best first, the reference last.
#include "kernel_pytorch/ops/layer_norm/layer_norm_shapes.h"
#include "kernel_pytorch/ops/layer_norm/operation.h"

namespace kernel_pytorch::layer_norm {
namespace {

using row_norm::BackwardProblem;
using row_norm::ForwardProblem;

std::span<const registry::Kernel<ForwardProblem>> forward_kernels() {
  static const registry::Kernel<ForwardProblem> kKernels[] = {row_norm::kForwardCudaWarp, row_norm::kForwardCudaBlock,
                                                              row_norm::kForwardCudaBulk, row_norm::kForwardCudaCluster,
                                                              row_norm::kForwardCudaAny,  row_norm::kForwardCpu,
                                                              row_norm::kForwardReference};
  return kKernels;
}

std::span<const registry::Kernel<BackwardProblem>> backward_kernels() {
  static const registry::Kernel<BackwardProblem> kKernels[] = {
      row_norm::kBackwardCudaWarp,    row_norm::kBackwardCudaBulk, row_norm::kBackwardCudaBlock,
      row_norm::kBackwardCudaCluster, row_norm::kBackwardCudaAny,  row_norm::kBackwardCpu,
      row_norm::kBackwardReference};
  return kKernels;
}

ForwardProblem make_forward(const registry::ProblemRequest& request) {
  return row_norm::make_forward(request, row_norm::Norm::kLayer);
}
BackwardProblem make_backward(const registry::ProblemRequest& request) {
  return row_norm::make_backward(request, row_norm::Norm::kLayer);
}

}  // namespace

constinit const registry::Operation<ForwardProblem> kForward{
    .name = "layer_norm_forward",
    .kernels = forward_kernels,
    .describe = row_norm::describe,
    .visit_tensors = row_norm::visit_tensors,
    .make = make_forward,
    .shrink = row_norm::shrink,
    .cost = row_norm::cost,
    .shapes = shapes,
};

constinit const registry::Operation<BackwardProblem> kBackward{
    .name = "layer_norm_backward",
    .kernels = backward_kernels,
    .describe = row_norm::describe,
    .visit_tensors = row_norm::visit_tensors,
    .make = make_backward,
    .shrink = row_norm::shrink,
    .cost = row_norm::cost,
    .shapes = shapes,
};

}  // namespace kernel_pytorch::layer_norm
