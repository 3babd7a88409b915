// The kernels of rms_norm, best first, the reference last.
#include "kernel_pytorch/ops/rms_norm/operation.h"
#include "kernel_pytorch/ops/row_norm/row_norm_operation.h"

namespace kernel_pytorch::rms_norm {
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
  return row_norm::make_forward(request, row_norm::Norm::kRms);
}
BackwardProblem make_backward(const registry::ProblemRequest& request) {
  return row_norm::make_backward(request, row_norm::Norm::kRms);
}

}  // namespace

constinit const registry::Operation<ForwardProblem> kForward =
    row_norm::make_operation("rms_norm_forward", forward_kernels, make_forward);
constinit const registry::Operation<BackwardProblem> kBackward =
    row_norm::make_operation("rms_norm_backward", backward_kernels, make_backward);

}  // namespace kernel_pytorch::rms_norm
