// Two floats of global memory at a time, as lanes hold them after a matrix product: the four lanes of a row touch one
// sector of 32 bytes. One function is one instruction under a predicate; an address is a multiple of 8 bytes.
#pragma once

#include "kernel_pytorch/base/fixed_width.h"

namespace kernel_pytorch::ptx {

// sm_20. Zeros where not `wanted`. Memory that this kernel writes after it has read it: never the read-only path.
__device__ __forceinline__ void ld_global_v2_f32_if(bool wanted, float& x, float& y, const float* address) {
  asm volatile(
      "{\n"
      ".reg .pred wanted;\n"
      "setp.ne.b32 wanted, %3, 0;\n"
      "mov.b32 %0, 0; mov.b32 %1, 0;\n"
      "@wanted ld.global.v2.f32 {%0, %1}, [%2];\n"
      "}"
      : "=&f"(x), "=&f"(y)
      : "l"(address), "r"(static_cast<int>(wanted))
      : "memory");
}

// sm_20
__device__ __forceinline__ void st_global_v2_f32_if(bool wanted, float* address, float x, float y) {
  asm volatile(
      "{\n"
      ".reg .pred wanted;\n"
      "setp.ne.b32 wanted, %3, 0;\n"
      "@wanted st.global.v2.f32 [%0], {%1, %2};\n"
      "}" ::"l"(address),
      "f"(x), "f"(y), "r"(static_cast<int>(wanted))
      : "memory");
}

// sm_20. Brings the line of 128 bytes that holds the address into L2.
__device__ __forceinline__ void prefetch_global_l2(const void* address) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(address));
}

}  // namespace kernel_pytorch::ptx
