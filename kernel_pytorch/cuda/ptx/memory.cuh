// Loads and stores of global and shared memory with their cache hints. One function is one instruction, named after its
// mnemonic, operands in PTX order. Nothing here checks alignment: a v4 needs 16 bytes.
#pragma once

#include "kernel_pytorch/base/fixed_width.h"

namespace kernel_pytorch::ptx {

struct alignas(16) Word4 {
  uint32_t x, y, z, w;
};

// The 32-bit shared-window address that every .shared instruction wants.
__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// sm_70. Data that no one writes while the kernel runs, kept out of L1.
__device__ __forceinline__ Word4 ld_global_nc_l1_no_allocate_v4(const void* address) {
  Word4 value;
  asm volatile("ld.global.nc.L1::no_allocate.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
               : "l"(address));
  return value;
}

// The same where `wanted`, else zeros: a predicate and no branch, so that neighbouring loads stay together.
__device__ __forceinline__ Word4 ld_global_nc_l1_no_allocate_v4_if(bool wanted, const void* address) {
  Word4 value;
  asm volatile(
      "{\n"
      ".reg .pred wanted;\n"
      "setp.ne.b32 wanted, %5, 0;\n"
      "mov.b32 %0, 0; mov.b32 %1, 0; mov.b32 %2, 0; mov.b32 %3, 0;\n"
      "@wanted ld.global.nc.L1::no_allocate.v4.b32 {%0, %1, %2, %3}, [%4];\n"
      "}"
      : "=&r"(value.x), "=&r"(value.y), "=&r"(value.z), "=&r"(value.w)
      : "l"(address), "r"(static_cast<int>(wanted)));
  return value;
}

// sm_80. The same with an L2 policy made by a createpolicy below.
__device__ __forceinline__ Word4 ld_global_nc_l1_no_allocate_l2_cache_hint_v4(const void* address, uint64_t policy) {
  Word4 value;
  asm volatile("ld.global.nc.L1::no_allocate.L2::cache_hint.v4.b32 {%0, %1, %2, %3}, [%4], %5;"
               : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
               : "l"(address), "l"(policy));
  return value;
}

// sm_80. The same for memory that this kernel writes after it has read it: never the read-only path.
__device__ __forceinline__ Word4 ld_global_l1_no_allocate_l2_cache_hint_v4(const void* address, uint64_t policy) {
  Word4 value;
  asm volatile("ld.global.L1::no_allocate.L2::cache_hint.v4.b32 {%0, %1, %2, %3}, [%4], %5;"
               : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
               : "l"(address), "l"(policy)
               : "memory");
  return value;
}

// sm_35. Through L1: small data that every block reads again, such as a weight.
__device__ __forceinline__ Word4 ld_global_nc_v4(const void* address) {
  Word4 value;
  asm volatile("ld.global.nc.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
               : "l"(address));
  return value;
}

// sm_20. Data that an earlier kernel of the same programmatic launch may have written: never the read-only path.
__device__ __forceinline__ Word4 ld_global_v4(const void* address) {
  Word4 value;
  asm volatile("ld.global.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
               : "l"(address)
               : "memory");
  return value;
}

// The same where `wanted`, else zeros. Not the read-only path, whose loads the assembler would move out of a loop and
// spill what they brought.
__device__ __forceinline__ Word4 ld_global_v4_if(bool wanted, const void* address) {
  Word4 value;
  asm volatile(
      "{\n"
      ".reg .pred wanted;\n"
      "setp.ne.b32 wanted, %5, 0;\n"
      "mov.b32 %0, 0; mov.b32 %1, 0; mov.b32 %2, 0; mov.b32 %3, 0;\n"
      "@wanted ld.global.v4.b32 {%0, %1, %2, %3}, [%4];\n"
      "}"
      : "=&r"(value.x), "=&r"(value.y), "=&r"(value.z), "=&r"(value.w)
      : "l"(address), "r"(static_cast<int>(wanted))
      : "memory");
  return value;
}

// sm_20
__device__ __forceinline__ void st_global_v4(void* address, Word4 value) {
  asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(address), "r"(value.x), "r"(value.y), "r"(value.z),
               "r"(value.w)
               : "memory");
}

// The same where `wanted`: a predicate and no branch, which what leads to the value would be moved into.
__device__ __forceinline__ void st_global_v4_if(bool wanted, void* address, Word4 value) {
  asm volatile(
      "{\n"
      ".reg .pred wanted;\n"
      "setp.ne.b32 wanted, %5, 0;\n"
      "@wanted st.global.v4.b32 [%0], {%1, %2, %3, %4};\n"
      "}" ::"l"(address),
      "r"(value.x), "r"(value.y), "r"(value.z), "r"(value.w), "r"(static_cast<int>(wanted))
      : "memory");
}

// sm_80
__device__ __forceinline__ void st_global_l2_cache_hint_v4(void* address, Word4 value, uint64_t policy) {
  asm volatile("st.global.L2::cache_hint.v4.b32 [%0], {%1, %2, %3, %4}, %5;" ::"l"(address), "r"(value.x), "r"(value.y),
               "r"(value.z), "r"(value.w), "l"(policy)
               : "memory");
}

// sm_90. Adds four floats in one transaction; the order among threads is not fixed.
__device__ __forceinline__ void red_global_add_v4_f32(float* address, float x, float y, float z, float w) {
  asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(address), "f"(x), "f"(y), "f"(z),
               "f"(w)
               : "memory");
}

// sm_20
__device__ __forceinline__ Word4 ld_shared_v4(uint32_t address) {
  Word4 value;
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
               : "r"(address)
               : "memory");
  return value;
}

// The same where `wanted`; elsewhere `value` stays what it is, so that lanes without a part keep their zeros.
__device__ __forceinline__ void ld_shared_v4_where(bool wanted, Word4& value, uint32_t address) {
  asm volatile(
      "{\n"
      ".reg .pred wanted;\n"
      "setp.ne.b32 wanted, %5, 0;\n"
      "@wanted ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];\n"
      "}"
      : "+r"(value.x), "+r"(value.y), "+r"(value.z), "+r"(value.w)
      : "r"(address), "r"(static_cast<int>(wanted))
      : "memory");
}

// sm_20
__device__ __forceinline__ void st_shared_v4(uint32_t address, Word4 value) {
  asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(value.x), "r"(value.y), "r"(value.z),
               "r"(value.w)
               : "memory");
}

// sm_20. Widened with zeros.
__device__ __forceinline__ uint32_t ld_shared_u8(uint32_t address) {
  uint32_t value;
  asm volatile("ld.shared.u8 %0, [%1];" : "=r"(value) : "r"(address) : "memory");
  return value;
}
__device__ __forceinline__ uint32_t ld_shared_u16(uint32_t address) {
  uint16_t value;
  asm volatile("ld.shared.u16 %0, [%1];" : "=h"(value) : "r"(address) : "memory");
  return value;
}

// sm_20
__device__ __forceinline__ uint32_t ld_shared_u32(uint32_t address) {
  uint32_t value;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(value) : "r"(address) : "memory");
  return value;
}
__device__ __forceinline__ float ld_shared_f32(uint32_t address) {
  float value;
  asm volatile("ld.shared.f32 %0, [%1];" : "=f"(value) : "r"(address) : "memory");
  return value;
}

// sm_20
__device__ __forceinline__ uint32_t ld_shared_b32(uint32_t address) {
  uint32_t value;
  asm volatile("ld.shared.b32 %0, [%1];" : "=r"(value) : "r"(address) : "memory");
  return value;
}

// sm_20
__device__ __forceinline__ void st_shared_f32(uint32_t address, float value) {
  asm volatile("st.shared.f32 [%0], %1;" ::"r"(address), "f"(value) : "memory");
}

// sm_20
__device__ __forceinline__ void ld_shared_v2_f32(float& x, float& y, uint32_t address) {
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(x), "=f"(y) : "r"(address) : "memory");
}

// sm_20
__device__ __forceinline__ void st_shared_v2_f32(uint32_t address, float x, float y) {
  asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(address), "f"(x), "f"(y) : "memory");
}

// sm_20
__device__ __forceinline__ void st_shared_u16(uint32_t address, uint16_t value) {
  asm volatile("st.shared.u16 [%0], %1;" ::"r"(address), "h"(value) : "memory");
}

// sm_20. For a value that is never negative: the store never executes, but the compiler does not move the computation
// of the value across it. It keeps arithmetic before an asynchronous wait, which ptxas would hoist above it.
__device__ __forceinline__ void st_shared_f32_if_negative(uint32_t address, float value) {
  asm volatile(
      "{\n"
      ".reg .pred negative;\n"
      "setp.lt.f32 negative, %1, 0f00000000;\n"
      "@negative st.shared.f32 [%0], %1;\n"
      "}" ::"r"(address),
      "f"(value)
      : "memory");
}

// sm_80
__device__ __forceinline__ uint64_t createpolicy_fractional_l2_evict_first() {
  uint64_t policy;
  asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

// sm_80
__device__ __forceinline__ uint64_t createpolicy_fractional_l2_evict_normal() {
  uint64_t policy;
  asm volatile("createpolicy.fractional.L2::evict_normal.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

}  // namespace kernel_pytorch::ptx
