// Host side of plan_decode on the GPU: one block.
#include "kernel_pytorch/ops/paged_attention/cuda/attend_host.h"
#include "kernel_pytorch/ops/paged_attention/plan/operation.h"

namespace kernel_pytorch::paged_attention {
namespace {

constexpr const char* kPlanSource = "kernel_pytorch/ops/paged_attention/plan/plan.cuh";

registry::Support supports_plan(const PlanDecode&, const DeviceInfo& device) {
  return registry::Support::unless(cuda_obstacle(DType::kFloat32, device));
}

DeviceCode plan_decode_code() {
  return {.source = kPlanSource, .entry = "kernel_pytorch::paged_attention::plan_requests", .minimum_capability = 80};
}

void run_plan(const PlanDecode& problem, int, Context& context) {
  static const std::string kLabel = "plan_decode";
  static KernelTable<1> table;
  PlanArguments arguments = plan_arguments(problem);
  launch(context, table.get(0, context, plan_decode_code), 1, kPlanThreads, 0, arguments, kLabel);
}

uint64_t plan_hash() {
  return jit::source_hash(kPlanSource);
}
std::vector<DeviceCode> plan_device_code() {
  return {plan_decode_code()};
}

}  // namespace

constinit const registry::Kernel<PlanDecode> kPlanCuda{.name = "cuda",
                                                       .supports = supports_plan,
                                                       .run = run_plan,
                                                       .source_hash = plan_hash,
                                                       .device_code = plan_device_code};

}  // namespace kernel_pytorch::paged_attention
