// Fences between the generic proxy (ordinary loads and stores) and the async proxy (the copy engine). sm_90.
#pragma once

namespace kernel_pytorch::ptx {

// Before a bulk store reads shared memory that this thread wrote.
__device__ __forceinline__ void fence_proxy_async_shared_cta() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// Makes mbarrier_init visible to the cluster and to the copy engine.
__device__ __forceinline__ void fence_mbarrier_init_release_cluster() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

}  // namespace kernel_pytorch::ptx
