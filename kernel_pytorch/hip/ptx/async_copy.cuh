// cp.async without the asynchrony: a load and a store at its issue, which is one of the moments that its contract
// allows.
#pragma once

#include "kernel_pytorch/base/fixed_width.h"
#include "kernel_pytorch/cuda/ptx/memory.cuh"

namespace kernel_pytorch::ptx {

__device__ __forceinline__ void cp_async_cg_shared_global_16(uint32_t destination, const void* source) {
  st_shared_v4(destination, ld_global_v4(source));
}
__device__ __forceinline__ void cp_async_cg_shared_global_16_fill(uint32_t destination, const void* source,
                                                                  uint32_t bytes) {
  Word4 value{0, 0, 0, 0};
  if (bytes >= 16) {
    value = ld_global_v4(source);
  } else if (bytes > 0) {
    uint32_t words[4] = {};
#pragma unroll
    for (uint32_t i = 0; i < 16; ++i) {
      if (i < bytes) words[i / 4] |= static_cast<uint32_t>(static_cast<const uint8_t*>(source)[i]) << (i % 4 * 8);
    }
    value = {words[0], words[1], words[2], words[3]};
  }
  st_shared_v4(destination, value);
}
__device__ __forceinline__ void cp_async_cg_shared_global_16_fill_l2_256(uint32_t destination, const void* source,
                                                                         uint32_t bytes) {
  cp_async_cg_shared_global_16_fill(destination, source, bytes);
}
__device__ __forceinline__ void cp_async_ca_shared_global_8_fill(uint32_t destination, const void* source,
                                                                 uint32_t bytes) {
  const auto* words = static_cast<const uint32_t*>(source);
  *shared_place<uint32_t>(destination) = bytes > 0 ? words[0] : 0;
  *shared_place<uint32_t>(destination + 4) = bytes > 0 ? words[1] : 0;
}
__device__ __forceinline__ void cp_async_ca_shared_global_4(uint32_t destination, const void* source) {
  *shared_place<uint32_t>(destination) = *static_cast<const uint32_t*>(source);
}
__device__ __forceinline__ void cp_async_ca_shared_global_4_fill(uint32_t destination, const void* source,
                                                                 uint32_t bytes) {
  *shared_place<uint32_t>(destination) = bytes > 0 ? *static_cast<const uint32_t*>(source) : 0;
}
KP_NO_AMD_FORM("mbarriers") void cp_async_mbarrier_arrive_noinc(uint32_t barrier);

__device__ __forceinline__ void cp_async_commit_group() {}
template <int kPending>
__device__ __forceinline__ void cp_async_wait_group() {}

}  // namespace kernel_pytorch::ptx
