// plan_decode: what is refused, the sizes of a unit, and how a kernel of the CPU reads a plan.
#include "kernel_pytorch/ops/paged_attention/plan/operation.h"

#include <algorithm>

#include "kernel_pytorch/base/error.h"
#include "kernel_pytorch/device/rehearsal.h"
#include "kernel_pytorch/ops/paged_attention/operation.h"
#include "kernel_pytorch/registry/choose.h"

namespace kernel_pytorch::paged_attention {
namespace {

constexpr int64_t kUnbounded = int64_t{1} << 30;
constexpr int64_t kInvariantKeys = 1024, kFewestKeys = 128;  // of a unit
constexpr int64_t kCpuRows = 64, kCudaRows = 16;             // of a tile
constexpr int64_t kTasksPerThread = 4;

bool is_readable(const TensorView& view) {
  return view.device.kind == DeviceKind::kCpu && view.data != nullptr && !Rehearsal::is_running();
}

void check_integers(std::string_view name, const TensorView& view, int64_t count, Device device) {
  KP_CHECK(view.is_present() && view.device == device, "plan_decode: ", name, " is ", view, ", the call runs on ",
           device, "; move all tensors to one device");
  KP_CHECK(view.dtype == DType::kInt32, "plan_decode: ", name, " is ", view.dtype, "; convert it to int32");
  KP_CHECK(view.rank == 1 && view.sizes[0] == count && is_contiguous(view), "plan_decode: ", name, " has shape ",
           shape_text(view.shape()), "; it must be [", count, "] and contiguous");
}

// Whatever the batch, or so that every thread has some.
int64_t keys_of_unit(const PlanDecode& problem, Context& context) {
  if (problem.batch_invariant || !is_readable(problem.seq_lens)) return kInvariantKeys;
  PlanDecode trial = problem;
  trial.unit_keys = kInvariantKeys;
  const auto* lengths = problem.seq_lens.as<const int32_t>();
  const int64_t threads = context.threads == nullptr ? 1 : context.threads->count();
  for (; trial.unit_keys > kFewestKeys; trial.unit_keys /= 2) {
    const PlanShape shape = plan_arguments(trial).shape;
    int64_t units = 0;
    for (int64_t i = 0; i < problem.seq_lens.sizes[0]; ++i) units += plan_units(shape, problem.queries, lengths[i]);
    if (units >= kTasksPerThread * threads) break;
  }
  return trial.unit_keys;
}

}  // namespace

PlanArguments plan_arguments(const PlanDecode& problem) {
  const auto side = [](int64_t value) { return value < 0 ? kUnbounded : std::min(value, kUnbounded); };
  const bool has_offsets = problem.cu_seqlens_q.is_present();
  return {.shape = {.group = problem.heads / problem.key_heads,
                    .key_heads = problem.key_heads,
                    .unit_keys = problem.unit_keys,
                    .tile_rows = problem.tile_rows,
                    .tile_heads = problem.tile_heads,
                    .window_left = side(problem.window_left),
                    .window_right = problem.causal ? 0 : side(problem.window_right),
                    .most_keys = problem.most_keys > 0 ? problem.most_keys : kUnbounded},
          .seq_lens = problem.seq_lens.as<const int32_t>(),
          .cu_seqlens_q = has_offsets ? problem.cu_seqlens_q.as<const int32_t>() : nullptr,
          .requests = problem.seq_lens.sizes[0],
          .queries = problem.queries,
          .plan = problem.plan.is_present() ? problem.plan.as<int32_t>() : nullptr,
          .capacity = problem.plan.sizes[0]};
}

void check(PlanDecode& problem, Device device) {
  KP_CHECK(problem.seq_lens.rank == 1, "plan_decode: seq_lens has shape ", shape_text(problem.seq_lens.shape()),
           "; it must be [requests]");
  const int64_t requests = problem.seq_lens.sizes[0];
  check_integers("seq_lens", problem.seq_lens, requests, device);
  if (problem.cu_seqlens_q.is_present()) check_integers("cu_seqlens_q", problem.cu_seqlens_q, requests + 1, device);
  KP_CHECK(problem.heads > 0 && problem.key_heads > 0 && problem.heads % problem.key_heads == 0,
           "plan_decode: heads is ", problem.heads, ", key_heads is ", problem.key_heads,
           "; the first must be a multiple of the second");
  KP_CHECK(problem.queries >= 0, "plan_decode: queries is ", problem.queries, "; it must be at least 0");
  KP_CHECK(problem.window_left >= -1 && problem.window_right >= -1, "plan_decode: the window is (", problem.window_left,
           ", ", problem.window_right, "); its sides must be at least 0, or -1");
  KP_CHECK(problem.unit_keys >= 0 && problem.tile_rows >= 0 && problem.tile_heads >= 0 && problem.most_keys >= 0,
           "plan_decode: unit_keys, tile_rows, tile_heads and most_keys must be at least 0");
  const TensorView& plan = problem.plan;
  KP_CHECK(plan.is_present() && plan.device == device && plan.dtype == DType::kInt32 && plan.rank == 1 &&
               is_contiguous(plan),
           "plan_decode: plan is ", plan, "; it must be contiguous int32 [numbers] on ", device);
  KP_CHECK(plan.sizes[0] > kPlanHeader + requests, "plan_decode: plan has ", plan.sizes[0], " numbers, ", requests,
           " requests need ", kPlanHeader + requests + 1, "; give it room for the largest batch");
}

void plan_decode(const PlanDecode& arguments, Context& context) {
  PlanDecode problem = arguments;
  check(problem, context.device());
  if (problem.tile_rows == 0) problem.tile_rows = context.info->is_cuda() ? kCudaRows : kCpuRows;
  if (problem.tile_heads == 0) problem.tile_heads = 1;
  if (problem.unit_keys == 0) problem.unit_keys = keys_of_unit(problem, context);
  registry::run_best(kPlanDecode, problem, context);
}

void check_plan(const Attend& problem, Device device) {
  const TensorView& plan = problem.plan;
  if (!plan.is_present()) return;
  const int64_t requests = problem.seq_lens.sizes[0];
  KP_CHECK(plan.device == device, "paged_attention: plan is on ", plan.device, ", the call runs on ", device,
           "; move all tensors to one device");
  KP_CHECK(
      plan.dtype == DType::kInt32 && plan.rank == 1 && is_contiguous(plan) && plan.sizes[0] > kPlanHeader + requests,
      "paged_attention: plan is ", plan, " of ", requests, " requests; it must be what plan_decode returned");
}

int64_t planned_keys(const Attend& problem, int64_t unplanned) {
  if (!problem.plan.is_present()) return unplanned;
  const auto* plan = problem.plan.as<const int32_t>();
  const int64_t requests = problem.seq_lens.sizes[0], key_heads = problem.key_cache.sizes[2];
  const int64_t group = problem.query.sizes[1] / std::max<int64_t>(key_heads, 1);
  KP_CHECK(plan[kPlanAtVersion] == kPlanVersion && plan[kPlanAtUnitKeys] > 0 && plan[kPlanAtTileRows] > 0 &&
               plan[kPlanAtTileHeads] > 0,
           "paged_attention: plan begins with ", plan[kPlanAtVersion], ", ", plan[kPlanAtRequests],
           "; it must be what plan_decode returned");
  KP_CHECK(plan[kPlanAtRequests] == requests && plan[kPlanAtGroup] == group && plan[kPlanAtKeyHeads] == key_heads,
           "paged_attention: the plan is of ", plan[kPlanAtRequests], " requests with ", plan[kPlanAtKeyHeads], " x ",
           plan[kPlanAtGroup], " heads, the call has ", requests, " with ", key_heads, " x ", group,
           "; plan this step anew");
  PlanDecode expected{.cu_seqlens_q = problem.cu_seqlens_q,
                      .heads = problem.query.sizes[1],
                      .key_heads = key_heads,
                      .queries = requests > 0 ? problem.query.sizes[0] / requests : 0,
                      .causal = problem.causal,
                      .window_left = problem.window_left,
                      .window_right = problem.window_right,
                      .unit_keys = plan[kPlanAtUnitKeys],
                      .tile_rows = plan[kPlanAtTileRows],
                      .tile_heads = plan[kPlanAtTileHeads]};
  const PlanShape shape = plan_arguments(expected).shape;
  for (int64_t i = 0; i < requests; ++i) {
    const Request request = request_at(problem, i);
    const int64_t units = int64_t{plan[kPlanHeader + i + 1]} - plan[kPlanHeader + i];
    const int64_t own = plan_units(shape, request.queries, problem.seq_lens.as<const int32_t>()[i]);
    const int64_t clamped = plan_units(shape, request.queries, request.keys);
    KP_CHECK(units == own || units == clamped, "paged_attention: the plan has ", units, " units for request ", i,
             ", its length and window make ", own, "; plan this step anew");
  }
  return plan[kPlanAtUnitKeys];
}

}  // namespace kernel_pytorch::paged_attention
