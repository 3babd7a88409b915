// A contiguous run of bytes through the copy engine, one thread asking. sm_90; addresses and bytes in multiples of 16.
#pragma once

#include "kernel_pytorch/base/fixed_width.h"
#include "kernel_pytorch/cuda/ptx/bulk_copy.cuh"
#include "kernel_pytorch/cuda/tile/barrier.cuh"

namespace kernel_pytorch::tile {

// The barrier must have been told to expect the bytes (arrive_expect_bytes), before or after.
__device__ __forceinline__ void copy_to_shared(uint32_t destination, const void* source, uint32_t bytes,
                                               const Barrier& barrier, uint64_t policy) {
  ptx::cp_async_bulk_shared_global_l2_cache_hint(destination, source, bytes, barrier.address(), policy);
}

__device__ __forceinline__ void copy_to_shared(uint32_t destination, const void* source, uint32_t bytes,
                                               const Barrier& barrier) {
  ptx::cp_async_bulk_shared_global(destination, source, bytes, barrier.address());
}

// Every thread that wrote the source calls publish_to_copy_engine, the block synchronises, then one thread copies. The
// source may be written again after wait_source_read, the kernel may end after wait_written.
__device__ __forceinline__ void publish_to_copy_engine() {
  ptx::fence_proxy_async_shared_cta();
}

__device__ __forceinline__ void copy_to_global(void* destination, uint32_t source, uint32_t bytes) {
  ptx::cp_async_bulk_global_shared(destination, source, bytes);
  ptx::cp_async_bulk_commit_group();
}
template <int kPending>
__device__ __forceinline__ void wait_source_read() {
  ptx::cp_async_bulk_wait_group_read<kPending>();
}
__device__ __forceinline__ void wait_written() {
  ptx::cp_async_bulk_wait_group<0>();
}

}  // namespace kernel_pytorch::tile
