// mma.sync, emulated: runtime/matrix.cpp.
#pragma once

#include "kernel_pytorch/base/fixed_width.h"

namespace kernel_pytorch::ptx {

inline void mma_m16n8k16_f32_bf16(float (&sum)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  emulated_mma(kEmulatedBf16, sum, a, b0, b1);
}
inline void mma_m16n8k16_f32_f16(float (&sum)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  emulated_mma(kEmulatedF16, sum, a, b0, b1);
}
inline void mma_m16n8k8_f32_tf32(float (&sum)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  emulated_mma(kEmulatedTf32, sum, a, b0, b1);
}

}  // namespace kernel_pytorch::ptx
