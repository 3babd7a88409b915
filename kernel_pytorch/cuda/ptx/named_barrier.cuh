// The sixteen barriers of a block, by number. Barrier 0 is __syncthreads'. sm_70.
#pragma once

#include "kernel_pytorch/base/fixed_width.h"

namespace kernel_pytorch::ptx {

// Returns once `threads` threads, whole warps, have come to this barrier.
__device__ __forceinline__ void barrier_sync(int barrier, int threads) {
  asm volatile("barrier.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

}  // namespace kernel_pytorch::ptx
