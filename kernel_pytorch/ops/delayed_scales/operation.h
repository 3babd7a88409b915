// delayed_scales as the registry sees it, the kernels that its list names, and what they compute of one tensor.
#pragma once

#include "kernel_pytorch/ops/delayed_scales/delayed_scales.h"
#include "kernel_pytorch/registry/kernel.h"

namespace kernel_pytorch::delayed_scales {

void check(const Update& problem, Device device);  // throws what update() throws

extern const registry::Operation<Update> kUpdate;
extern const registry::Kernel<Update> kCuda, kCpu, kReference;

inline constexpr float kLeastScale = 0x1p-126f, kMostScale = 0x1p126f;

// Elements of each layer's tensors.
inline int64_t elements_of(const Update& problem) {
  return problem.amax.empty() ? 0 : problem.amax[0].element_count();
}

}  // namespace kernel_pytorch::delayed_scales
