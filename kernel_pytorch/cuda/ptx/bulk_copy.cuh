// cp.async.bulk: one thread moves a contiguous run of bytes between global and shared memory through the copy engine.
// Addresses and sizes are multiples of 16 bytes. sm_90.
#pragma once

#include "kernel_pytorch/base/fixed_width.h"

namespace kernel_pytorch::ptx {

// Completes `bytes` on the barrier of this block.
__device__ __forceinline__ void cp_async_bulk_shared_global(uint32_t destination, const void* source, uint32_t bytes,
                                                            uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(destination),
      "l"(source), "r"(bytes), "r"(barrier)
      : "memory");
}

__device__ __forceinline__ void cp_async_bulk_shared_global_l2_cache_hint(uint32_t destination, const void* source,
                                                                          uint32_t bytes, uint32_t barrier,
                                                                          uint64_t policy) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::
          "r"(destination),
      "l"(source), "r"(bytes), "r"(barrier), "l"(policy)
      : "memory");
}

// Belongs to the issuing thread's bulk group; ordinary writes of `source` need fence_proxy_async_shared_cta first.
__device__ __forceinline__ void cp_async_bulk_global_shared(void* destination, uint32_t source, uint32_t bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(destination), "r"(source), "r"(bytes)
               : "memory");
}

__device__ __forceinline__ void cp_async_bulk_commit_group() {
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

// At most kPending groups still have reads of shared memory to do: the others' source may be written again.
template <int kPending>
__device__ __forceinline__ void cp_async_bulk_wait_group_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kPending) : "memory");
}

// At most kPending groups are unfinished: the others' writes are done.
template <int kPending>
__device__ __forceinline__ void cp_async_bulk_wait_group() {
  asm volatile("cp.async.bulk.wait_group %0;" ::"n"(kPending) : "memory");
}

}  // namespace kernel_pytorch::ptx
