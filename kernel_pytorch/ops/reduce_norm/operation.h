// reduce_norm as the registry sees it, and the kernels that its list names.
#pragma once

#include "kernel_pytorch/ops/reduce_norm/reduce_norm.h"
#include "kernel_pytorch/registry/kernel.h"

namespace kernel_pytorch::reduce_norm {

inline constexpr int64_t kChunkElements = 16384;

void check(const Norm& problem, Device device);  // throws what norm() throws

extern const registry::Operation<Norm> kNorm;
extern const registry::Kernel<Norm> kReference, kCpu, kCuda;

}  // namespace kernel_pytorch::reduce_norm
