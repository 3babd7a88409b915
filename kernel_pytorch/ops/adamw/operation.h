// adamw as the registry sees it, and the kernels that its list names.
#pragma once

#include "kernel_pytorch/ops/adamw/adamw.h"
#include "kernel_pytorch/registry/kernel.h"

namespace kernel_pytorch::adamw {

void check(const Step& problem, Device device);  // throws what step() throws

extern const registry::Operation<Step> kStep;
extern const registry::Kernel<Step> kReference, kCpu, kCuda;

}  // namespace kernel_pytorch::adamw
