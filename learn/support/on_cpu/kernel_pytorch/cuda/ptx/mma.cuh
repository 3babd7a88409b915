// Stands before the shipped header of this name when a kernel runs on a CPU. A warp multiplies 16 x 16 by 16 x 8; which
// lane holds which element is as on a GPU.
#pragma once
#include "cuda.h"

namespace kernel_pytorch::ptx {
inline float half_of(uint32_t word, int half) {
  return __uint_as_float(half == 0 ? word << 16 : word & 0xffff0000u);
}
inline void mma_m16n8k16_f32_bf16(float (&sum)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  const int lane = threadIdx.x % 32, first = static_cast<int>(threadIdx.x) - lane;
  uint64_t* mine = on_cpu::slots[threadIdx.x];
  for (int i = 0; i < 4; ++i) mine[i] = a[i];
  mine[4] = b0;
  mine[5] = b1;
  on_cpu::meet_warp();
  for (int i = 0; i < 4; ++i) {
    const int row = lane / 4 + i / 2 * 8, column = lane % 4 * 2 + i % 2;
    for (int k = 0; k < 16; ++k) {
      const auto& of_a = on_cpu::slots[first + row % 8 * 4 + k % 8 / 2];
      const auto& of_b = on_cpu::slots[first + column * 4 + k % 8 / 2];
      sum[i] += half_of(of_a[row / 8 + k / 8 * 2], k % 2) * half_of(of_b[4 + k / 8], k % 2);
    }
  }
  on_cpu::meet_warp();
}
}  // namespace kernel_pytorch::ptx
