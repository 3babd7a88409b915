// The mbarrier as a type, and where a ring of them stands. sm_90. A Barrier lives in shared memory; one thread calls
// init, then the block synchronises.
#pragma once

#include "kernel_pytorch/base/fixed_width.h"
#include "kernel_pytorch/cuda/ptx/fence.cuh"
#include "kernel_pytorch/cuda/ptx/mbarrier.cuh"
#include "kernel_pytorch/cuda/ptx/memory.cuh"

namespace kernel_pytorch::tile {

// Until the phase with this parity of the barrier at this shared address is over.
__device__ __forceinline__ void wait_for_barrier(uint32_t address, uint32_t parity) {
  while (!ptx::mbarrier_try_wait_parity(address, parity)) {
  }
}

class Barrier {
 public:
  // Made visible to the copy engine and to the cluster; the block (or cluster) still has to synchronise.
  __device__ __forceinline__ void init(int arrivals) {
    ptx::mbarrier_init(address(), arrivals);
    ptx::fence_mbarrier_init_release_cluster();
  }
  __device__ __forceinline__ void arrive() { ptx::mbarrier_arrive(address()); }
  __device__ __forceinline__ void arrive_expect_bytes(uint32_t bytes) {
    ptx::mbarrier_arrive_expect_tx(address(), bytes);
  }
  // Until the phase with this parity is over. A fresh barrier is in phase 0.
  __device__ __forceinline__ void wait(uint32_t parity) { wait_for_barrier(address(), parity); }
  // The same where other blocks of the cluster completed it.
  __device__ __forceinline__ void wait_cluster(uint32_t parity) {
    while (!ptx::mbarrier_try_wait_parity_acquire_cluster(address(), parity)) {
    }
  }
  __device__ __forceinline__ uint32_t address() const { return ptx::shared_address(&state_); }

 private:
  uint64_t state_;
};

// A place in a ring: the parity flips when it wraps, and only here.
struct PipelineState {
  int stage = 0;
  uint32_t parity = 0;

  __device__ __forceinline__ void advance(int stages) {
    if (++stage == stages) {
      stage = 0;
      parity ^= 1;
    }
  }
};

}  // namespace kernel_pytorch::tile
