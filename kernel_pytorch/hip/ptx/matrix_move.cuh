// ldmatrix by addresses that lanes hand each other.
#pragma once

#include "kernel_pytorch/base/fixed_width.h"
#include "kernel_pytorch/cuda/ptx/memory.cuh"

namespace kernel_pytorch::ptx {

// What a lane of this warp holds. Taken anew each time: addresses of a whole loop would fill the registers.
__device__ __forceinline__ uint32_t of_lane(uint32_t word, int lane) {
  auto taken = static_cast<uint32_t>(hip::take(static_cast<int>(word), (static_cast<int>(__lane_id()) & 32) + lane));
  hip::keep_here(taken);
  return taken;
}

__device__ __forceinline__ void ldmatrix_x4(uint32_t (&values)[4], uint32_t address) {
  const int lane = static_cast<int>(__lane_id()) % 32;
#pragma unroll
  for (int m = 0; m < 4; ++m) values[m] = ld_shared_b32(of_lane(address, m * 8 + lane / 4) + lane % 4 * 4);
}
__device__ __forceinline__ void ldmatrix_x4_trans(uint32_t (&values)[4], uint32_t address) {
  const int lane = static_cast<int>(__lane_id()) % 32;
#pragma unroll
  for (int m = 0; m < 4; ++m) {
    const int row = m * 8 + lane % 4 * 2, column = lane / 4 * 2;
    values[m] = ld_shared_u16(of_lane(address, row) + column) | ld_shared_u16(of_lane(address, row + 1) + column) << 16;
  }
}

}  // namespace kernel_pytorch::ptx
