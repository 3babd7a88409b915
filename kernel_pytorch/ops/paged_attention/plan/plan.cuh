// The plan of a step: one block sums up the units of all requests, 1024 at a time.
#pragma once

#include "kernel_pytorch/ops/paged_attention/plan/plan_cuda.h"

namespace kernel_pytorch::paged_attention {

__device__ __forceinline__ int64_t units_of_request(const PlanArguments& arguments, int64_t index) {
  int64_t queries = arguments.queries;
  if (arguments.cu_seqlens_q != nullptr) {
    queries = int64_t{arguments.cu_seqlens_q[index + 1]} - arguments.cu_seqlens_q[index];
    queries = queries > 0 ? queries : 0;
  }
  return plan_units(arguments.shape, queries, arguments.seq_lens[index]);
}

__global__ void __launch_bounds__(kPlanThreads) plan_requests(const __grid_constant__ PlanArguments arguments) {
  __shared__ int64_t totals[kPlanThreads / 32];
  const int32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  int32_t* starts = arguments.plan + kPlanHeader;
  int64_t before = 0;
  for (int64_t first = 0; first < arguments.requests; first += kPlanThreads) {
    const int64_t index = first + threadIdx.x;
    const int64_t own = index < arguments.requests ? units_of_request(arguments, index) : 0;
    int64_t sum = own;
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2) {
      const int64_t other = __shfl_up_sync(0xffffffffu, sum, distance);
      if (lane >= distance) sum += other;
    }
    if (lane == 31) totals[warp] = sum;
    __syncthreads();
    int64_t all = 0;
    for (int i = 0; i < kPlanThreads / 32; ++i) {
      if (i < warp) sum += totals[i];
      all += totals[i];
    }
    if (index < arguments.requests) starts[index] = plan_number(before + sum - own);
    before += all;
    __syncthreads();
  }
  for (int64_t i = arguments.requests + threadIdx.x; i < arguments.capacity - kPlanHeader; i += kPlanThreads) {
    starts[i] = plan_number(before);
  }
  if (threadIdx.x != 0) return;
  const PlanShape& shape = arguments.shape;
  arguments.plan[kPlanAtVersion] = kPlanVersion;
  arguments.plan[kPlanAtRequests] = static_cast<int32_t>(arguments.requests);
  arguments.plan[kPlanAtGroup] = static_cast<int32_t>(shape.group);
  arguments.plan[kPlanAtKeyHeads] = static_cast<int32_t>(shape.key_heads);
  arguments.plan[kPlanAtUnitKeys] = static_cast<int32_t>(shape.unit_keys);
  arguments.plan[kPlanAtTileRows] = static_cast<int32_t>(shape.tile_rows);
  arguments.plan[kPlanAtTileHeads] = static_cast<int32_t>(shape.tile_heads);
  arguments.plan[kPlanAtUnits] = plan_number(before);
}

}  // namespace kernel_pytorch::paged_attention
