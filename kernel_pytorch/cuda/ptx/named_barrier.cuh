// The sixteen barriers of a block, by number. Barrier 0 is __syncthreads'. sm_70.
#pragma once

#include "kernel_pytorch/base/fixed_width.h"

namespace kernel_pytorch::ptx {

// Returns once `threads` threads, whole warps, have come to this barrier.
__device__ __forceinline__ void barrier_sync(int barrier, int threads) {
  asm volatile("barrier.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

// The same where every thread of a warp comes together (no check that it does): one instruction instead of a loop.
__device__ __forceinline__ void barrier_sync_aligned(int barrier, int threads) {
  asm volatile("barrier.sync.aligned %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

// Comes to the barrier without waiting.
__device__ __forceinline__ void barrier_arrive_aligned(int barrier, int threads) {
  asm volatile("barrier.arrive.aligned %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

}  // namespace kernel_pytorch::ptx
