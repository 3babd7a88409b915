// The delta rule as the registry sees it, and the kernels that its lists name.
#pragma once

#include "kernel_pytorch/ops/linear_attention/delta/delta.h"
#include "kernel_pytorch/ops/linear_attention/operation.h"

namespace kernel_pytorch::linear_attention::delta {

// Throw what the ops throw.
void check(const Forward& problem, Device device);
void check(const Backward& problem, Device device);

extern const registry::Operation<Forward> kForward;
extern const registry::Operation<Backward> kBackward;
extern const registry::Kernel<Forward> kForwardReference, kForwardCpu, kForwardCuda, kForwardSm90;
extern const registry::Kernel<Backward> kBackwardReference, kBackwardCpu, kBackwardCuda, kBackwardSm90;

// The state that a sequence reads and writes, of indices that the host may read; -1: none.
template <class Problem>
int64_t slot_of(const Problem& problem, int64_t sequence) {
  if constexpr (requires { problem.state_index; }) {
    if (problem.state_index.is_present()) {
      return index_at(problem.state_index.data, problem.state_index.dtype == DType::kInt64, sequence);
    }
  }
  return sequence;
}

}  // namespace kernel_pytorch::linear_attention::delta
