// mbarrier: the barrier object in shared memory that threads arrive on and bulk copies complete on. sm_80 for the plain
// forms, sm_90 for transaction bytes and try_wait. Waits never suspend for good: callers loop.
#pragma once

#include "kernel_pytorch/base/fixed_width.h"

namespace kernel_pytorch::ptx {

// sm_80
__device__ __forceinline__ void mbarrier_init(uint32_t barrier, uint32_t count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(count) : "memory");
}

// sm_80
__device__ __forceinline__ void mbarrier_arrive(uint32_t barrier) {
  asm volatile("{ .reg .b64 state; mbarrier.arrive.shared::cta.b64 state, [%0]; }" ::"r"(barrier) : "memory");
}

// sm_90. On the barrier of any block of the cluster, by its cluster-window address (mapa_shared_cluster). Says that
// this thread is done reading; its writes are not released to the other block, which would cost a fence of the whole
// device.
__device__ __forceinline__ void mbarrier_arrive_shared_cluster(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// sm_90
__device__ __forceinline__ void mbarrier_arrive_expect_tx(uint32_t barrier, uint32_t bytes) {
  asm volatile("{ .reg .b64 state; mbarrier.arrive.expect_tx.shared::cta.b64 state, [%0], %1; }" ::"r"(barrier),
               "r"(bytes)
               : "memory");
}

// sm_90. True once the phase of this parity has completed.
__device__ __forceinline__ bool mbarrier_try_wait_parity(uint32_t barrier, uint32_t parity) {
  uint32_t done;
  asm volatile("{ .reg .pred done; mbarrier.try_wait.parity.shared::cta.b64 done, [%1], %2; selp.b32 %0, 1, 0, done; }"
               : "=r"(done)
               : "r"(barrier), "r"(parity)
               : "memory");
  return done != 0;
}

// sm_90. The same, acquiring what other blocks of the cluster wrote before they arrived.
__device__ __forceinline__ bool mbarrier_try_wait_parity_acquire_cluster(uint32_t barrier, uint32_t parity) {
  uint32_t done;
  asm volatile(
      "{ .reg .pred done; mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%1], %2; "
      "selp.b32 %0, 1, 0, done; }"
      : "=r"(done)
      : "r"(barrier), "r"(parity)
      : "memory");
  return done != 0;
}

}  // namespace kernel_pytorch::ptx
