// norm_rope as the registry sees it, and what its kernels share.
#pragma once

#include "kernel_pytorch/ops/norm_rope/norm_rope.h"
#include "kernel_pytorch/registry/kernel.h"

namespace kernel_pytorch::norm_rope {

extern const registry::Operation<Forward> kForward;
extern const registry::Operation<Backward> kBackward;
extern const registry::Kernel<Forward> kForwardCuda, kForwardReference;
extern const registry::Kernel<Backward> kBackwardCuda, kBackwardReference;

// Throws what forward() and backward() throw; sets rotary_dim.
void check(Forward& problem, Device device);
void check(Backward& problem, Device device);

// The norm, then the rotation, each by the kernel that it chooses.
void compose(const Forward& problem, Context& context);
void compose(const Backward& problem, Context& context);

// The dimensions of x: batch is the first, columns are the last.
template <class Problem>
int sequence_dimension(const Problem& problem) {
  return problem.heads_first ? 2 : 1;
}
template <class Problem>
int head_dimension(const Problem& problem) {
  return problem.heads_first ? 1 : 2;
}

// Of a table: elements from one batch to the next, 0 where all share one, and from one place to the next.
inline int64_t table_batch_stride(const TensorView& table) {
  return table.rank == 3 && table.sizes[0] > 1 ? table.strides[0] : 0;
}
inline int64_t table_row_stride(const TensorView& table) {
  return table.stride(-2);
}

}  // namespace kernel_pytorch::norm_rope
