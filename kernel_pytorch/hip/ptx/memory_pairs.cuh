// Loads and stores of eight bytes, as memory.cuh has for sixteen.
#pragma once

#include "kernel_pytorch/base/fixed_width.h"
#include "kernel_pytorch/cuda/ptx/memory.cuh"

namespace kernel_pytorch::ptx {

struct alignas(8) Word2 {
  uint32_t x, y;
};
using Vector2 = uint32_t __attribute__((vector_size(8)));

__device__ __forceinline__ Word2 ld_global_nc_l1_no_allocate_v2_if(bool wanted, const void* address) {
  if (!wanted) return {0, 0};
  return __builtin_bit_cast(Word2, __builtin_nontemporal_load(static_cast<const Vector2*>(address)));
}
__device__ __forceinline__ void st_global_v2_if(bool wanted, void* address, Word2 value) {
  if (wanted) *static_cast<Word2*>(address) = value;
}
__device__ __forceinline__ Word2 ld_shared_v2(uint32_t address) {
  return __builtin_bit_cast(Word2, *shared_place<Vector2>(address));
}

}  // namespace kernel_pytorch::ptx
