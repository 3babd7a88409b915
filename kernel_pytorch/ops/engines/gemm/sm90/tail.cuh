// Rows of a grouped product behind its last group: zeros, or nobody would have written them. sm_90.
#pragma once

#include "kernel_pytorch/cuda/ptx/memory.cuh"
#include "kernel_pytorch/ops/engines/gemm/sm90/schedule.cuh"

namespace kernel_pytorch::product {

// By all threads of the consumers, of which this is `thread`.
template <Sm90Epilogue kEpilogue, class Out>
__device__ __forceinline__ void clear_tail(const Sm90Arguments& arguments, int32_t thread) {
  constexpr bool kGated = kEpilogue.form == Sm90Form::kGated || kEpilogue.form == Sm90Form::kGatedHalves;
  constexpr int32_t kPerVector = 16 / static_cast<int32_t>(sizeof(Out)), kThreads = 128 * kSm90Warpgroups;
  const Sm90Groups& groups = arguments.groups;
  const int32_t end = groups.count == 0 ? 0 : group_end(groups, groups.count - 1);
  for (int32_t row = end + static_cast<int32_t>(blockIdx.x); row < groups.rows; row += gridDim.x) {
    for (int32_t column = thread * kPerVector; column < arguments.n; column += kThreads * kPerVector) {
      if (column < arguments.n / (kGated ? 2 : 1)) {
        ptx::st_global_v4(static_cast<Out*>(groups.output) + row * groups.output_stride + column, {0, 0, 0, 0});
      }
      if constexpr (kEpilogue.preactivation) {
        Out* target = static_cast<Out*>(groups.preactivation) + row * groups.preactivation_stride + column;
        ptx::st_global_v4(target, {0, 0, 0, 0});
      }
    }
  }
}

}  // namespace kernel_pytorch::product
