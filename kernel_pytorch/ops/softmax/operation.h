// softmax as the registry sees it: its checked arguments and the kernels that compute them.
#pragma once

#include "kernel_pytorch/base/rows.h"
#include "kernel_pytorch/ops/softmax/cuda/arguments_cuda.h"
#include "kernel_pytorch/ops/softmax/softmax.h"
#include "kernel_pytorch/registry/kernel.h"

namespace kernel_pytorch::softmax {

// Rows are the leading dimensions of x and output, merged; the mask keeps leading dimensions of its own, since a
// broadcast one merges differently. rows_of() is the same for all.
using ForwardProblem = Forward;
using BackwardProblem = Backward;

inline bool removes_scores(const ForwardProblem& problem) {
  return problem.causal || problem.mask.is_present();
}
inline MaskKind mask_kind_of(const ForwardProblem& problem) {
  if (!problem.mask.is_present()) return MaskKind::kNone;
  if (problem.mask.dtype == DType::kBool) return MaskKind::kBool;
  return problem.mask.dtype == problem.x.dtype ? MaskKind::kSameType : MaskKind::kFloat;
}

extern const registry::Kernel<ForwardProblem> kForwardReference, kForwardCpu, kForwardCudaRows, kForwardCudaCluster,
    kForwardCudaAny;
extern const registry::Kernel<BackwardProblem> kBackwardReference, kBackwardCpu, kBackwardCudaRows,
    kBackwardCudaCluster, kBackwardCudaAny;

// Throw what forward() and backward() throw; leave the problem as described above.
void check(ForwardProblem& problem, Device device);
void check(BackwardProblem& problem, Device device);

extern const registry::Operation<ForwardProblem> kForward;
extern const registry::Operation<BackwardProblem> kBackward;

}  // namespace kernel_pytorch::softmax
