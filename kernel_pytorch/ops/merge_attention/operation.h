// Merging parts of attention as the registry sees it, and the kernels that its list names.
#pragma once

#include "kernel_pytorch/ops/merge_attention/merge_attention.h"
#include "kernel_pytorch/registry/kernel.h"

namespace kernel_pytorch::merge_attention {

void check(const Merge& problem, Device device);

extern const registry::Operation<Merge> kMerge;
extern const registry::Kernel<Merge> kMergeReference, kMergeCpu, kMergeCuda;

}  // namespace kernel_pytorch::merge_attention
