// Loads and stores of eight bytes, as memory.cuh has for sixteen: four 16-bit values for four floats. A v2 needs 8
// bytes of alignment.
#pragma once

#include "kernel_pytorch/base/fixed_width.h"

namespace kernel_pytorch::ptx {

struct alignas(8) Word2 {
  uint32_t x, y;
};

// sm_70. Data that no one writes while the kernel runs, kept out of L1; where `wanted`, else zeros.
__device__ __forceinline__ Word2 ld_global_nc_l1_no_allocate_v2_if(bool wanted, const void* address) {
  Word2 value;
  asm volatile(
      "{\n"
      ".reg .pred wanted;\n"
      "setp.ne.b32 wanted, %3, 0;\n"
      "mov.b32 %0, 0; mov.b32 %1, 0;\n"
      "@wanted ld.global.nc.L1::no_allocate.v2.b32 {%0, %1}, [%2];\n"
      "}"
      : "=&r"(value.x), "=&r"(value.y)
      : "l"(address), "r"(static_cast<int>(wanted)));
  return value;
}

// sm_20, where `wanted`.
__device__ __forceinline__ void st_global_v2_if(bool wanted, void* address, Word2 value) {
  asm volatile(
      "{\n"
      ".reg .pred wanted;\n"
      "setp.ne.b32 wanted, %3, 0;\n"
      "@wanted st.global.v2.b32 [%0], {%1, %2};\n"
      "}" ::"l"(address),
      "r"(value.x), "r"(value.y), "r"(static_cast<int>(wanted))
      : "memory");
}

// sm_20
__device__ __forceinline__ Word2 ld_shared_v2(uint32_t address) {
  Word2 value;
  asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];" : "=r"(value.x), "=r"(value.y) : "r"(address) : "memory");
  return value;
}

}  // namespace kernel_pytorch::ptx
