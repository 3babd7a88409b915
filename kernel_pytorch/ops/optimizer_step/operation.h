// optimizer_step as the registry sees it, and the kernels that its list names.
#pragma once

#include "kernel_pytorch/ops/optimizer_step/factors_cuda.h"
#include "kernel_pytorch/ops/optimizer_step/optimizer_step.h"
#include "kernel_pytorch/registry/kernel.h"

namespace kernel_pytorch::optimizer_step {

void check(const Step& problem, Device device);  // throws what step() throws

// The factors of one parameter, where the host may read the signals; and whether the step is skipped.
template <class Real>
FactorsOf<Real> factors_of(const Step& step, const Parameter& one);
bool is_skipped(const Step& step);
Rates rates_of(const Step& step);
// Philox blocks of the parameters' first elements.
std::vector<int64_t> random_starts(const Step& step);

extern const registry::Operation<Step> kStep;
extern const registry::Kernel<Step> kReference, kCpu, kCuda, kSm90;

}  // namespace kernel_pytorch::optimizer_step
