// mma.sync of 8-bit integers, emulated: runtime/matrix.cpp.
#pragma once

#include "kernel_pytorch/base/fixed_width.h"

namespace kernel_pytorch::ptx {

inline void mma_m16n8k32_s32_s8(int32_t (&sum)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  emulated_integer_mma(sum, a, b0, b1);
}

}  // namespace kernel_pytorch::ptx
