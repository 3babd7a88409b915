// cross_entropy as the registry sees it. Forward and backward are one problem: where the lse is given, nothing is
// reduced and the gradient alone is written.
#pragma once

#include "kernel_pytorch/base/rows.h"
#include "kernel_pytorch/ops/cross_entropy/cross_entropy.h"
#include "kernel_pytorch/ops/support/indices_cuda.h"
#include "kernel_pytorch/registry/kernel.h"

namespace kernel_pytorch::cross_entropy {

struct Problem {
  TensorView logits{};     // [rows..., columns], leading dimensions merged where strides allow
  TensorView target{};     // [rows] int64 or int32, contiguous
  TensorView weight{};     // optional [vocabulary]
  TensorView given_lse{};  // backward: [rows]
  TensorView grad_loss{};  // backward: [rows] or [1]
  TensorView loss{}, lse{}, total{}, grad_logits{}, partials{};
  Options options{};  // vocabulary is set
  Reduction reduction = Reduction::kMean;
  double gradient_scale = 1;

  bool is_backward() const { return given_lse.is_present(); }
};

struct RescaleProblem {
  TensorView tensor{};  // [elements]
  TensorView scale{};
};

inline int64_t target_at(const TensorView& target, int64_t row) {
  return index_at(target.data, target.dtype == DType::kInt64, row);
}

extern const registry::Kernel<Problem> kReference, kCpu, kCudaCluster, kCudaBlock;
extern const registry::Kernel<RescaleProblem> kRescaleReference, kRescaleCpu, kRescaleCuda;

// Throw what the ops throw; leave the problem as described above.
void check_forward(Problem& problem, Device device);
void check_backward(Problem& problem, Device device);
void check_rescale(RescaleProblem& problem, Device device);

extern const registry::Operation<Problem> kForward, kBackward;
extern const registry::Operation<RescaleProblem> kRescale;

}  // namespace kernel_pytorch::cross_entropy
