// mma.sync of doubles, emulated: runtime/matrix.cpp.
#pragma once

#include "kernel_pytorch/base/fixed_width.h"

namespace kernel_pytorch::ptx {

inline void mma_m8n8k4_f64(double& sum0, double& sum1, double a, double b) {
  double sum[2] = {sum0, sum1};
  emulated_double_mma(sum, &a, b, 8);
  sum0 = sum[0];
  sum1 = sum[1];
}
inline void mma_m16n8k4_f64(double (&sum)[4], const double (&a)[2], double b) {
  emulated_double_mma(sum, a, b, 16);
}

}  // namespace kernel_pytorch::ptx
