// softmax as the registry sees it: problems with checked arguments and the kernels that compute them.
#pragma once

#include "kernel_pytorch/base/rows.h"
#include "kernel_pytorch/ops/softmax/softmax.h"
#include "kernel_pytorch/ops/softmax/softmax_cuda.h"
#include "kernel_pytorch/registry/kernel.h"

namespace kernel_pytorch::softmax {

// Rows are the leading dimensions of x and output, merged; the mask keeps leading dimensions of its own, since a
// broadcast one merges differently. rows_of() is the same for all.
struct ForwardProblem {
  TensorView x{};
  TensorView mask{};
  TensorView output{};
  double scale = 1.0;
  bool causal = false;
  bool log = false;
  int64_t queries = 1;  // size of the second-to-last dimension: a row's query index is row % queries

  bool removes_scores() const { return causal || mask.is_present(); }
  MaskKind mask_kind() const {
    if (!mask.is_present()) return MaskKind::kNone;
    if (mask.dtype == DType::kBool) return MaskKind::kBool;
    return mask.dtype == x.dtype ? MaskKind::kSameType : MaskKind::kFloat;
  }
};

struct BackwardProblem {
  TensorView grad_output{};
  TensorView output{};
  TensorView grad_input{};
  double scale = 1.0;
  bool log = false;
  bool masked = false;
};

extern const registry::Kernel<ForwardProblem> kForwardReference, kForwardCpu, kForwardCudaRows, kForwardCudaCluster,
    kForwardCudaAny;
extern const registry::Kernel<BackwardProblem> kBackwardReference, kBackwardCpu, kBackwardCudaRows,
    kBackwardCudaCluster, kBackwardCudaAny;

extern const registry::Operation<ForwardProblem> kForward;
extern const registry::Operation<BackwardProblem> kBackward;

}  // namespace kernel_pytorch::softmax
