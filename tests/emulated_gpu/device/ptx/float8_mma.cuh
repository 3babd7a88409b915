// mma.sync of FP8, emulated: runtime/matrix.cpp.
#pragma once

#include "kernel_pytorch/base/fixed_width.h"

namespace kernel_pytorch::ptx {

inline void mma_m16n8k32_f32_e4m3_e4m3(float (&sum)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  emulated_float8_mma(kEmulatedE4M3, kEmulatedE4M3, sum, a, b0, b1);
}
inline void mma_m16n8k32_f32_e4m3_e5m2(float (&sum)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  emulated_float8_mma(kEmulatedE4M3, kEmulatedE5M2, sum, a, b0, b1);
}
inline void mma_m16n8k32_f32_e5m2_e4m3(float (&sum)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  emulated_float8_mma(kEmulatedE5M2, kEmulatedE4M3, sum, a, b0, b1);
}
inline void mma_m16n8k32_f32_e5m2_e5m2(float (&sum)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  emulated_float8_mma(kEmulatedE5M2, kEmulatedE5M2, sum, a, b0, b1);
}

}  // namespace kernel_pytorch::ptx
