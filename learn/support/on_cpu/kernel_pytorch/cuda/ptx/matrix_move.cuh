// Stands before the shipped header of this name when a kernel runs on a CPU. Lane i names row i % 8 of matrix i / 8.
#pragma once
#include "cuda.h"

namespace kernel_pytorch::ptx {
inline void ldmatrix_x4(uint32_t (&values)[4], uint32_t address) {
  const int lane = threadIdx.x % 32;
  for (int matrix = 0; matrix < 4; ++matrix) {
    const uint32_t row = on_cpu::from_lane(address, matrix * 8 + lane / 4);
    std::memcpy(&values[matrix], reinterpret_cast<const char*>(static_cast<uintptr_t>(row)) + lane % 4 * 4, 4);
  }
}
}  // namespace kernel_pytorch::ptx
