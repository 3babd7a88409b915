// Thread block clusters and distributed shared memory. sm_90. For kernels launched as clusters of two blocks or more:
// st.async from a launch without clusters was seen to end in an illegal instruction.
#pragma once

#include "kernel_pytorch/base/fixed_width.h"

namespace kernel_pytorch::ptx {

__device__ __forceinline__ uint32_t cluster_ctarank() {
  uint32_t rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

__device__ __forceinline__ uint32_t cluster_nctarank() {
  uint32_t count;
  asm("mov.u32 %0, %%cluster_nctarank;" : "=r"(count));
  return count;
}

__device__ __forceinline__ uint32_t clusterid_x() {
  uint32_t index;
  asm("mov.u32 %0, %%clusterid.x;" : "=r"(index));
  return index;
}

__device__ __forceinline__ uint32_t nclusterid_x() {
  uint32_t count;
  asm("mov.u32 %0, %%nclusterid.x;" : "=r"(count));
  return count;
}

__device__ __forceinline__ void barrier_cluster_arrive() {
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}

__device__ __forceinline__ void barrier_cluster_wait() {
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// The cluster-window address of the same variable in block `rank`.
__device__ __forceinline__ uint32_t mapa_shared_cluster(uint32_t address, uint32_t rank) {
  uint32_t mapped;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(mapped) : "r"(address), "r"(rank));
  return mapped;
}

// Writes 4, 8 or 16 bytes into a block's shared memory and completes as many on that block's barrier.
__device__ __forceinline__ void st_async_shared_cluster_b32(uint32_t address, uint32_t value, uint32_t barrier) {
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [%0], %1, [%2];" ::"r"(address), "r"(value),
               "r"(barrier)
               : "memory");
}

__device__ __forceinline__ void st_async_shared_cluster_b64(uint32_t address, uint64_t value, uint32_t barrier) {
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.b64 [%0], %1, [%2];" ::"r"(address), "l"(value),
               "r"(barrier)
               : "memory");
}

__device__ __forceinline__ void st_async_shared_cluster_v4_f32(uint32_t address, float x, float y, float z, float w,
                                                               uint32_t barrier) {
  asm volatile(
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(address),
      "f"(x), "f"(y), "f"(z), "f"(w), "r"(barrier)
      : "memory");
}

}  // namespace kernel_pytorch::ptx
