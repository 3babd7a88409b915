// A contiguous run of bytes through the copy engine, one thread asking. sm_90; addresses and bytes in multiples of 16.
#pragma once

#include "kernel_pytorch/base/fixed_width.h"
#include "kernel_pytorch/cuda/ptx/bulk_copy.cuh"
#include "kernel_pytorch/cuda/tile/barrier.cuh"

namespace kernel_pytorch::tile {

// The barrier must expect the bytes (arrive_expect_bytes), before or after.
__device__ __forceinline__ void copy_to_shared(uint32_t destination, const void* source, uint32_t bytes,
                                               const Barrier& barrier, uint64_t policy) {
  ptx::cp_async_bulk_shared_global_l2_cache_hint(destination, source, bytes, barrier.address(), policy);
}

__device__ __forceinline__ void copy_to_shared(uint32_t destination, const void* source, uint32_t bytes,
                                               const Barrier& barrier) {
  ptx::cp_async_bulk_shared_global(destination, source, bytes, barrier.address());
}

}  // namespace kernel_pytorch::tile
