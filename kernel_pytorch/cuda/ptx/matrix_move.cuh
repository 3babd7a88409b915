// ldmatrix and stmatrix: a warp moves 8 x 8 matrices of 16-bit elements between shared memory and fragments. Lane i
// names row i % 8 of matrix i / 8, 16 bytes; register m of a lane holds columns 2 * (lane % 4) and the next of row
// lane / 4 of matrix m, or with trans rows 2 * (lane % 4) and the next of column lane / 4.
#pragma once

#include "kernel_pytorch/base/fixed_width.h"

namespace kernel_pytorch::ptx {

// sm_75
__device__ __forceinline__ void ldmatrix_x4(uint32_t (&values)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(values[0]), "=r"(values[1]), "=r"(values[2]), "=r"(values[3])
               : "r"(address)
               : "memory");
}
__device__ __forceinline__ void ldmatrix_x4_trans(uint32_t (&values)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(values[0]), "=r"(values[1]), "=r"(values[2]), "=r"(values[3])
               : "r"(address)
               : "memory");
}

// sm_90
__device__ __forceinline__ void stmatrix_x4(uint32_t address, const uint32_t (&values)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(values[0]),
               "r"(values[1]), "r"(values[2]), "r"(values[3])
               : "memory");
}

// Each matrix transposed: lane i names column i % 8 of it.
__device__ __forceinline__ void stmatrix_x4_trans(uint32_t address, const uint32_t (&values)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(values[0]),
               "r"(values[1]), "r"(values[2]), "r"(values[3])
               : "memory");
}

// sm_75. An 8 x 8 matrix of 16-bit numbers, of which every lane holds two neighbours of row lane / 4, transposed.
__device__ __forceinline__ uint32_t movmatrix_trans(uint32_t value) {
  uint32_t result;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(result) : "r"(value));
  return result;
}

}  // namespace kernel_pytorch::ptx
