// ldmatrix, stmatrix and movmatrix, emulated: runtime/matrix.cpp.
#pragma once

#include "kernel_pytorch/base/fixed_width.h"

namespace kernel_pytorch::ptx {

inline void ldmatrix_x4(uint32_t (&values)[4], uint32_t address) {
  emulated_ldmatrix(values, address, 0);
}
inline void ldmatrix_x4_trans(uint32_t (&values)[4], uint32_t address) {
  emulated_ldmatrix(values, address, 1);
}
inline void stmatrix_x4(uint32_t address, const uint32_t (&values)[4]) {
  emulated_stmatrix(address, values, 0);
}
inline void stmatrix_x4_trans(uint32_t address, const uint32_t (&values)[4]) {
  emulated_stmatrix(address, values, 1);
}
inline uint32_t movmatrix_trans(uint32_t value) {
  return emulated_movmatrix(value);
}

}  // namespace kernel_pytorch::ptx
