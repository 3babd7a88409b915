// The kernels of plan_decode, and the problems they are tested on.
#include "kernel_pytorch/base/error.h"
#include "kernel_pytorch/base/hash.h"
#include "kernel_pytorch/ops/paged_attention/plan/operation.h"
#include "kernel_pytorch/ops/support/cpu_support.h"
#include "kernel_pytorch/registry/declared.h"
#include "kernel_pytorch/registry/request_options.h"

namespace kernel_pytorch::paged_attention {
namespace {

// A request's shape is [requests]; options besides those of the list: ragged.
PlanDecode make_plan(const registry::ProblemRequest& request) {
  PlanDecode problem;
  std::vector<std::string_view> known = registry::option_names(kPlanFields);
  known.insert(known.end(), {"ragged"});
  registry::check_options(request, known);
  registry::make_options(kPlanFields, request, &problem);
  KP_CHECK(request.shape.size() == 1, "plan_decode: the shape is ", shape_text(request.shape),
           "; it must be [requests]");
  KP_CHECK(request.dtype == DType::kFloat32, "plan_decode: the request is ", request.dtype,
           "; a plan has no numbers of that type, ask for fp32");
  const int64_t requests = request.shape[0];
  if (problem.key_heads == 0) problem.key_heads = 2;
  if (problem.heads == 0) problem.heads = 4 * problem.key_heads;
  if (problem.unit_keys == 0) problem.unit_keys = 64;
  if (problem.tile_rows == 0) problem.tile_rows = 16;
  if (problem.tile_heads == 0) problem.tile_heads = 1;
  if (problem.capacity == 0) problem.capacity = kPlanHeader + requests + 5;
  problem.seq_lens = contiguous_view(nullptr, DType::kInt32, {requests}, request.device);
  if (registry::flag_option(request, "ragged", false)) {
    problem.cu_seqlens_q = contiguous_view(nullptr, DType::kInt32, {requests + 1}, request.device);
  }
  problem.plan = contiguous_view(nullptr, DType::kInt32, {problem.capacity}, request.device);
  return problem;
}

registry::Filling plan_filling(const PlanDecode& problem, std::string_view tensor) {
  if (tensor == "seq_lens") return {.content = registry::Content::kIndices, .limit = 5000};
  if (tensor == "cu_seqlens_q") return {.content = registry::Content::kOffsets, .limit = 300};
  return registry::detail::declared_filling(kPlanFields, &problem, tensor);
}

// The same on every device: whole numbers, one request after another.
void run_plan_reference(const PlanDecode& problem, int, Context&) {
  const PlanArguments arguments = plan_arguments(problem);
  const PlanShape& shape = arguments.shape;
  int32_t* plan = arguments.plan;
  int64_t units = 0;
  for (int64_t i = 0; i < arguments.requests; ++i) {
    int64_t queries = arguments.queries;
    if (arguments.cu_seqlens_q != nullptr) {
      queries = std::max(arguments.cu_seqlens_q[i + 1] - arguments.cu_seqlens_q[i], 0);
    }
    plan[kPlanHeader + i] = plan_number(units);
    units += plan_units(shape, queries, arguments.seq_lens[i]);
  }
  for (int64_t i = kPlanHeader + arguments.requests; i < arguments.capacity; ++i) plan[i] = plan_number(units);
  plan[kPlanAtVersion] = kPlanVersion;
  plan[kPlanAtRequests] = static_cast<int32_t>(arguments.requests);
  plan[kPlanAtGroup] = static_cast<int32_t>(shape.group);
  plan[kPlanAtKeyHeads] = static_cast<int32_t>(shape.key_heads);
  plan[kPlanAtUnitKeys] = static_cast<int32_t>(shape.unit_keys);
  plan[kPlanAtTileRows] = static_cast<int32_t>(shape.tile_rows);
  plan[kPlanAtTileHeads] = static_cast<int32_t>(shape.tile_heads);
  plan[kPlanAtUnits] = plan_number(units);
}

uint64_t plan_version() {
  return hash_text("plan_decode reference 1");
}

constexpr const char* kPlanShapes = R"(
    fp32: 1; 3 ragged=1; 2000 heads=64 key_heads=8 queries=4; 70 window_left=100 causal=0 unit_keys=256 tile_heads=2; 0
)";

}  // namespace

constinit const registry::Kernel<PlanDecode> kPlanReference{.name = "reference",
                                                            .supports = supports_on_cpu<PlanDecode>,
                                                            .run = run_plan_reference,
                                                            .source_hash = plan_version};
constinit const registry::Operation<PlanDecode> kPlanDecode =
    registry::declared<PlanDecode, kPlanFields>({.name = "plan_decode",
                                                 .kernels = registry::kernel_list<kPlanCuda, kPlanReference>,
                                                 .filling = plan_filling,
                                                 .make = make_plan,
                                                 .check = check,
                                                 .shapes = kPlanShapes});

}  // namespace kernel_pytorch::paged_attention
