// plan_decode as the registry sees it.
#pragma once

#include "kernel_pytorch/ops/paged_attention/paged_attention.h"
#include "kernel_pytorch/ops/paged_attention/plan/plan_cuda.h"
#include "kernel_pytorch/registry/kernel.h"

namespace kernel_pytorch::paged_attention {

void check(PlanDecode& problem, Device device);
PlanArguments plan_arguments(const PlanDecode& problem);

extern const registry::Operation<PlanDecode> kPlanDecode;
extern const registry::Kernel<PlanDecode> kPlanCuda, kPlanReference;

// The keys of a piece of a request on the CPU: as the plan says, or what every request gets without one. A plan of
// other lengths, heads or windows is refused.
int64_t planned_keys(const Attend& problem, int64_t unplanned);

}  // namespace kernel_pytorch::paged_attention
