// cp.async.bulk.tensor: one thread moves a box of a tensor between global and shared memory; the tensor map (encoded by
// the host, device/cuda/tensor_map.h) knows sizes, strides and swizzle. What lies outside the tensor is read as zero,
// counted in the barrier's bytes, and not written. sm_90.
#pragma once

#include "kernel_pytorch/base/fixed_width.h"

namespace kernel_pytorch::ptx {

__device__ __forceinline__ void prefetch_tensormap(const void* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

// Coordinates are elements, the contiguous dimension first. Completes the box's bytes on the barrier of this block.
__device__ __forceinline__ void cp_async_bulk_tensor_3d_shared_global(uint32_t destination, const void* map, int x0,
                                                                      int x1, int x2, uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4}], "
      "[%5];" ::"r"(destination),
      "l"(map), "r"(x0), "r"(x1), "r"(x2), "r"(barrier)
      : "memory");
}
// To the same place of every block of the cluster whose bit is set, each completing on its own barrier.
__device__ __forceinline__ void cp_async_bulk_tensor_3d_shared_global_multicast(uint32_t destination, const void* map,
                                                                                int x0, int x1, int x2,
                                                                                uint32_t barrier, uint16_t blocks) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1, "
      "{%2, %3, %4}], [%5], %6;" ::"r"(destination),
      "l"(map), "r"(x0), "r"(x1), "r"(x2), "r"(barrier), "h"(blocks)
      : "memory");
}
__device__ __forceinline__ void cp_async_bulk_tensor_4d_shared_global(uint32_t destination, const void* map, int x0,
                                                                      int x1, int x2, int x3, uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4, %5}], "
      "[%6];" ::"r"(destination),
      "l"(map), "r"(x0), "r"(x1), "r"(x2), "r"(x3), "r"(barrier)
      : "memory");
}

// Belongs to the issuing thread's bulk group (bulk_copy.cuh: commit, waits); ordinary writes of `source` need
// fence_proxy_async_shared_cta first.
__device__ __forceinline__ void cp_async_bulk_tensor_3d_global_shared(const void* map, int x0, int x1, int x2,
                                                                      uint32_t source) {
  asm volatile("cp.async.bulk.tensor.3d.global.shared::cta.tile.bulk_group [%0, {%1, %2, %3}], [%4];" ::"l"(map),
               "r"(x0), "r"(x1), "r"(x2), "r"(source)
               : "memory");
}

}  // namespace kernel_pytorch::ptx
