// Loads and stores of global memory and of LDS. What passes by once is marked non-temporal; policies of the L2 cache
// say nothing here.
#pragma once

#include "kernel_pytorch/base/fixed_width.h"

namespace kernel_pytorch::ptx {

struct alignas(16) Word4 {
  uint32_t x, y, z, w;
};
using Vector4 = uint32_t __attribute__((vector_size(16)));

__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}
// A place in LDS; the compiler sees where the pointer comes from and uses LDS's instructions.
template <class T>
__device__ __forceinline__ T* shared_place(uint32_t address) {
  return static_cast<T*>(__cvta_shared_to_generic(address));
}

__device__ __forceinline__ Word4 ld_global_v4(const void* address) {
  return *static_cast<const Word4*>(address);
}
__device__ __forceinline__ Word4 ld_global_v4_if(bool wanted, const void* address) {
  return wanted ? ld_global_v4(address) : Word4{0, 0, 0, 0};
}
__device__ __forceinline__ Word4 ld_global_nc_v4(const void* address) {
  return ld_global_v4(address);
}
__device__ __forceinline__ Word4 ld_global_nc_l1_no_allocate_v4(const void* address) {
  return __builtin_bit_cast(Word4, __builtin_nontemporal_load(static_cast<const Vector4*>(address)));
}
__device__ __forceinline__ Word4 ld_global_nc_l1_no_allocate_v4_if(bool wanted, const void* address) {
  return wanted ? ld_global_nc_l1_no_allocate_v4(address) : Word4{0, 0, 0, 0};
}
__device__ __forceinline__ Word4 ld_global_nc_l1_no_allocate_l2_cache_hint_v4(const void* address, uint64_t) {
  return ld_global_nc_l1_no_allocate_v4(address);
}
__device__ __forceinline__ Word4 ld_global_l1_no_allocate_l2_cache_hint_v4(const void* address, uint64_t) {
  return ld_global_nc_l1_no_allocate_v4(address);
}

__device__ __forceinline__ void st_global_v4(void* address, Word4 value) {
  *static_cast<Word4*>(address) = value;
}
__device__ __forceinline__ void st_global_v4_if(bool wanted, void* address, Word4 value) {
  if (wanted) st_global_v4(address, value);
}
__device__ __forceinline__ void st_global_l2_cache_hint_v4(void* address, Word4 value, uint64_t) {
  st_global_v4(address, value);
}

__device__ __forceinline__ Word4 ld_shared_v4(uint32_t address) {
  return __builtin_bit_cast(Word4, *shared_place<Vector4>(address));
}
__device__ __forceinline__ void ld_shared_v4_where(bool wanted, Word4& value, uint32_t address) {
  if (wanted) value = ld_shared_v4(address);
}
__device__ __forceinline__ void st_shared_v4(uint32_t address, Word4 value) {
  *shared_place<Vector4>(address) = __builtin_bit_cast(Vector4, value);
}
__device__ __forceinline__ uint32_t ld_shared_u8(uint32_t address) {
  return *shared_place<uint8_t>(address);
}
__device__ __forceinline__ uint32_t ld_shared_u16(uint32_t address) {
  return *shared_place<uint16_t>(address);
}
__device__ __forceinline__ uint32_t ld_shared_u32(uint32_t address) {
  return *shared_place<uint32_t>(address);
}
__device__ __forceinline__ uint32_t ld_shared_b32(uint32_t address) {
  return *shared_place<uint32_t>(address);
}
__device__ __forceinline__ float ld_shared_f32(uint32_t address) {
  return *shared_place<float>(address);
}
__device__ __forceinline__ void st_shared_f32(uint32_t address, float value) {
  *shared_place<float>(address) = value;
}
__device__ __forceinline__ void ld_shared_v2_f32(float& x, float& y, uint32_t address) {
  x = ld_shared_f32(address);
  y = ld_shared_f32(address + 4);
}
__device__ __forceinline__ void st_shared_v2_f32(uint32_t address, float x, float y) {
  st_shared_f32(address, x);
  st_shared_f32(address + 4, y);
}
__device__ __forceinline__ void st_shared_u16(uint32_t address, uint16_t value) {
  *shared_place<uint16_t>(address) = value;
}
__device__ __forceinline__ uint64_t createpolicy_fractional_l2_evict_first() {
  return 0;
}
__device__ __forceinline__ uint64_t createpolicy_fractional_l2_evict_normal() {
  return 0;
}

}  // namespace kernel_pytorch::ptx
