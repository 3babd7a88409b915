// Sampling as the registry sees it, and the kernels that its list names.
#pragma once

#include "kernel_pytorch/ops/sample/sample.h"
#include "kernel_pytorch/registry/kernel.h"

namespace kernel_pytorch::sample {

void check(const Draw& problem, Device device);

extern const registry::Operation<Draw> kDraw;
extern const registry::Kernel<Draw> kDrawReference, kDrawCpu, kDrawCuda;

// The numbers of a row, on the CPU.
struct RowNumbers {
  float temperature = 1, top_p = 1, min_p = 0;
  int64_t top_k = 0;
  uint64_t seed = 0, position = 0;
};
RowNumbers numbers_of(const Draw& problem, int64_t row);

}  // namespace kernel_pytorch::sample
