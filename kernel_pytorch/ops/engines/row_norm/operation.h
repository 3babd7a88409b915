// An op of this engine as the registry sees it: its kernels, and what both norms share. A norm adds its name, its
// fields and its check.
#pragma once

#include "kernel_pytorch/ops/engines/row_norm/row_norm.h"
#include "kernel_pytorch/ops/engines/row_norm/shapes.h"
#include "kernel_pytorch/registry/declared.h"
#include "kernel_pytorch/registry/kernel.h"

namespace kernel_pytorch::row_norm {

extern const registry::Kernel<ForwardProblem> kForwardReference, kForwardCpu, kForwardCudaWarp, kForwardCudaBlock,
    kForwardCudaBulk, kForwardCudaCluster, kForwardCudaAny;
extern const registry::Kernel<BackwardProblem> kBackwardReference, kBackwardCpu, kBackwardCudaWarp, kBackwardCudaBlock,
    kBackwardCudaBulk, kBackwardCudaCluster, kBackwardCudaAny;

// Best first, the reference last. A problem carries its `norm`, so the same kernels serve both ops.
std::span<const registry::Kernel<ForwardProblem>> forward_kernels();
std::span<const registry::Kernel<BackwardProblem>> backward_kernels();

template <Norm kNorm, const auto& kFields, auto kCheck>
constexpr registry::Operation<ForwardProblem> forward_operation(std::string_view name) {
  return registry::declared<ForwardProblem, kFields>({.name = name,
                                                      .kernels = forward_kernels,
                                                      .check = kCheck,
                                                      .flops_per_element = 5,
                                                      .shapes = shapes<kNorm, true>});
}
template <Norm kNorm, const auto& kFields, auto kCheck>
constexpr registry::Operation<BackwardProblem> backward_operation(std::string_view name) {
  return registry::declared<BackwardProblem, kFields>({.name = name,
                                                       .kernels = backward_kernels,
                                                       .check = kCheck,
                                                       .flops_per_element = 12,
                                                       .shapes = shapes<kNorm, false>});
}

}  // namespace kernel_pytorch::row_norm
