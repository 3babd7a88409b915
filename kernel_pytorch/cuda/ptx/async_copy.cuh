// cp.async: each thread moves 4, 8 or 16 bytes from global to shared memory without holding them in registers. sm_80.
#pragma once

#include "kernel_pytorch/base/fixed_width.h"

namespace kernel_pytorch::ptx {

__device__ __forceinline__ void cp_async_cg_shared_global_16(uint32_t destination, const void* source) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(destination), "l"(source) : "memory");
}

// The first `bytes` (0 to 16) of them; the rest is filled with zeros. `source` is not read where bytes is 0.
__device__ __forceinline__ void cp_async_cg_shared_global_16_fill(uint32_t destination, const void* source,
                                                                  uint32_t bytes) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(destination), "l"(source), "r"(bytes) : "memory");
}

// The same, and the 256 bytes around the source are on their way to the L2 cache.
__device__ __forceinline__ void cp_async_cg_shared_global_16_fill_l2_256(uint32_t destination, const void* source,
                                                                         uint32_t bytes) {
  asm volatile("cp.async.cg.shared.global.L2::256B [%0], [%1], 16, %2;" ::"r"(destination), "l"(source), "r"(bytes)
               : "memory");
}

// Eight bytes, or zeros where `bytes` is 0.
__device__ __forceinline__ void cp_async_ca_shared_global_8_fill(uint32_t destination, const void* source,
                                                                 uint32_t bytes) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 8, %2;" ::"r"(destination), "l"(source), "r"(bytes) : "memory");
}

__device__ __forceinline__ void cp_async_ca_shared_global_4(uint32_t destination, const void* source) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(destination), "l"(source) : "memory");
}

// The same, or zeros where `bytes` is 0.
__device__ __forceinline__ void cp_async_ca_shared_global_4_fill(uint32_t destination, const void* source,
                                                                 uint32_t bytes) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(destination), "l"(source), "r"(bytes) : "memory");
}

// Arrives at the mbarrier once all of this thread's copies so far are complete; the barrier's count includes it.
__device__ __forceinline__ void cp_async_mbarrier_arrive_noinc(uint32_t barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}

__device__ __forceinline__ void cp_async_commit_group() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}

// Until at most kPending of this thread's latest groups are still under way.
template <int kPending>
__device__ __forceinline__ void cp_async_wait_group() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

}  // namespace kernel_pytorch::ptx
