// embedding as the registry sees it, and the kernels that its lists name. Problems have indices as [positions] and
// grad_output's leading dimensions merged where strides allow.
#pragma once

#include "kernel_pytorch/ops/embedding/embedding.h"
#include "kernel_pytorch/registry/kernel.h"

namespace kernel_pytorch::embedding {

// Throw what forward() and backward() throw; afterwards indices and rows are lists.
void check(Forward& problem, Device device);
void check(Backward& problem, Device device);

extern const registry::Operation<Forward> kForward;
extern const registry::Operation<Backward> kBackward;
extern const registry::Kernel<Forward> kForwardReference, kForwardCpu, kForwardCuda;
extern const registry::Kernel<Backward> kBackwardReference, kBackwardCpu, kBackwardCuda;

// The index at a position; on the CPU, where one outside the table is an error.
int64_t checked_index(const TensorView& indices, int64_t position, int64_t rows);

}  // namespace kernel_pytorch::embedding
