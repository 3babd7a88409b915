// Pairs of floats in global memory, emulated.
#pragma once

#include "kernel_pytorch/base/fixed_width.h"

namespace kernel_pytorch::ptx {

inline void ld_global_v2_f32_if(bool wanted, float& x, float& y, const float* address) {
  if (wanted && reinterpret_cast<unsigned long>(address) % 8 != 0) emulated_fail("a load of 8 bytes is not aligned");
  x = wanted ? address[0] : 0.0f;
  y = wanted ? address[1] : 0.0f;
}
inline void st_global_v2_f32_if(bool wanted, float* address, float x, float y) {
  if (!wanted) return;
  if (reinterpret_cast<unsigned long>(address) % 8 != 0) emulated_fail("a store of 8 bytes is not aligned");
  address[0] = x;
  address[1] = y;
}
inline void prefetch_global_l2(const void*) {}

}  // namespace kernel_pytorch::ptx
