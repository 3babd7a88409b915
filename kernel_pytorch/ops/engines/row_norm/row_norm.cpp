// The kernels of both norms.
#include "kernel_pytorch/ops/engines/row_norm/operation.h"

namespace kernel_pytorch::row_norm {

std::span<const registry::Kernel<ForwardProblem>> forward_kernels() {
  static const registry::Kernel<ForwardProblem> kKernels[] = {kForwardCudaWarp,    kForwardCudaBlock, kForwardCudaBulk,
                                                              kForwardCudaCluster, kForwardCudaAny,   kForwardCpu,
                                                              kForwardReference};
  return kKernels;
}

std::span<const registry::Kernel<BackwardProblem>> backward_kernels() {
  static const registry::Kernel<BackwardProblem> kKernels[] = {
      kBackwardCudaWarp, kBackwardCudaBulk, kBackwardCudaBlock, kBackwardCudaCluster,
      kBackwardCudaAny,  kBackwardCpu,      kBackwardReference};
  return kKernels;
}

}  // namespace kernel_pytorch::row_norm
