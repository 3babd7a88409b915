// Loads and stores, emulated: plain ones with a check of the alignment; cache hints do nothing.
#pragma once

#include "kernel_pytorch/base/fixed_width.h"

namespace kernel_pytorch::ptx {

struct alignas(16) Word4 {
  uint32_t x, y, z, w;
};

inline uint32_t shared_address(const void* pointer) {
  return emulated_shared_address(pointer);
}

inline const Word4& emulated_word4(const void* address) {
  if (reinterpret_cast<unsigned long>(address) % 16 != 0) emulated_fail("an access of 16 bytes is not aligned");
  return *static_cast<const Word4*>(address);
}
inline Word4 ld_global_nc_l1_no_allocate_v4(const void* address) {
  return emulated_word4(address);
}
inline Word4 ld_global_nc_l1_no_allocate_v4_if(bool wanted, const void* address) {
  return wanted ? emulated_word4(address) : Word4{0, 0, 0, 0};
}
inline Word4 ld_global_nc_l1_no_allocate_l2_cache_hint_v4(const void* address, uint64_t) {
  return emulated_word4(address);
}
inline Word4 ld_global_l1_no_allocate_l2_cache_hint_v4(const void* address, uint64_t) {
  return emulated_word4(address);
}
inline Word4 ld_global_nc_v4(const void* address) {
  return emulated_word4(address);
}
inline Word4 ld_global_v4(const void* address) {
  return emulated_word4(address);
}
inline Word4 ld_global_v4_if(bool wanted, const void* address) {
  return wanted ? emulated_word4(address) : Word4{0, 0, 0, 0};
}
inline void st_global_v4(void* address, Word4 value) {
  const_cast<Word4&>(emulated_word4(address)) = value;
}
inline void st_global_v4_if(bool wanted, void* address, Word4 value) {
  if (wanted) st_global_v4(address, value);
}
inline void st_global_l2_cache_hint_v4(void* address, Word4 value, uint64_t) {
  st_global_v4(address, value);
}
inline void red_global_add_v4_f32(float* address, float x, float y, float z, float w) {
  emulated_word4(address);
  address[0] += x;
  address[1] += y;
  address[2] += z;
  address[3] += w;
}

template <class T>
inline T& emulated_shared(uint32_t address) {
  return *static_cast<T*>(emulated_shared_pointer(address, sizeof(T)));
}
inline Word4 ld_shared_v4(uint32_t address) {
  return emulated_shared<Word4>(address);
}
inline void ld_shared_v4_where(bool wanted, Word4& value, uint32_t address) {
  if (wanted) value = emulated_shared<Word4>(address);
}
inline void st_shared_v4(uint32_t address, Word4 value) {
  emulated_shared<Word4>(address) = value;
}
inline uint32_t ld_shared_u8(uint32_t address) {
  return emulated_shared<uint8_t>(address);
}
inline uint32_t ld_shared_u16(uint32_t address) {
  return emulated_shared<uint16_t>(address);
}
inline uint32_t ld_shared_u32(uint32_t address) {
  return emulated_shared<uint32_t>(address);
}
inline float ld_shared_f32(uint32_t address) {
  return emulated_shared<float>(address);
}
inline uint32_t ld_shared_b32(uint32_t address) {
  return emulated_shared<uint32_t>(address);
}
inline void st_shared_f32(uint32_t address, float value) {
  emulated_shared<float>(address) = value;
}
inline void ld_shared_v2_f32(float& x, float& y, uint32_t address) {
  const float2 pair = emulated_shared<float2>(address);
  x = pair.x;
  y = pair.y;
}
inline void st_shared_v2_f32(uint32_t address, float x, float y) {
  emulated_shared<float2>(address) = {x, y};
}
inline void st_shared_u16(uint32_t address, uint16_t value) {
  emulated_shared<uint16_t>(address) = value;
}
inline void st_shared_f32_if_negative(uint32_t address, float value) {
  if (value < 0.0f) st_shared_f32(address, value);
}
inline uint64_t createpolicy_fractional_l2_evict_first() {
  return 1;
}
inline uint64_t createpolicy_fractional_l2_evict_normal() {
  return 0;
}

}  // namespace kernel_pytorch::ptx
