// mma.m8n8k4 of fp64: a warp multiplies an 8 x 4 by a 4 x 8 matrix, a double per lane: row lane / 4 and k lane % 4 of
// the first operand, k lane % 4 and column lane / 4 of the second; sums at columns 2 * (lane % 4) and the next of row
// lane / 4. m16n8k4 has eight rows more, as second values of the first operand and of the sums.
#pragma once

#include "kernel_pytorch/base/fixed_width.h"

namespace kernel_pytorch::ptx {

// sm_80
__device__ __forceinline__ void mma_m8n8k4_f64(double& sum0, double& sum1, double a, double b) {
  asm volatile("mma.sync.aligned.m8n8k4.row.col.f64.f64.f64.f64 {%0, %1}, {%2}, {%3}, {%0, %1};"
               : "+d"(sum0), "+d"(sum1)
               : "d"(a), "d"(b));
}

// sm_90
__device__ __forceinline__ void mma_m16n8k4_f64(double (&sum)[4], const double (&a)[2], double b) {
  asm volatile("mma.sync.aligned.m16n8k4.row.col.f64.f64.f64.f64 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
               : "+d"(sum[0]), "+d"(sum[1]), "+d"(sum[2]), "+d"(sum[3])
               : "d"(a[0]), "d"(a[1]), "d"(b));
}

}  // namespace kernel_pytorch::ptx
