// What crosses from the host side of the CPU kernels to the code built per instruction level (cpu/isa.h says why): a
// block of the output, and the rounding of a row.
#pragma once

#include "kernel_pytorch/base/fixed_width.h"
#include "kernel_pytorch/ops/support/cpu_levels.h"

namespace kernel_pytorch::int8_matmul {

struct IntegerBlock {
  const uint8_t* x;  // codes + 128, [m, x_stride]
  int64_t m, x_stride;
  const int8_t* weight;  // [n, k]
  int64_t n, k;
  int64_t block;        // columns of a sum in int32, a multiple of 32
  const float* scales;  // [n, groups]; with one group all blocks have its scale
  int64_t groups;
  float* sums;  // [m, sums_stride]
  int64_t sums_stride;
};

// By type: fp32, bf16, fp16. Returns the scale.
struct IntegerKernels {
  float (*round_row[3])(const void* row, int64_t k, uint8_t* codes);
  void (*multiply)(const IntegerBlock& block);
};
KP_EACH_CPU_LEVEL(extern const IntegerKernels kIntegerKernels;)

// By instructions for dot products of bytes: AVX-512 VNNI, on a machine that has it besides the level v4; Arm's SDOT
// and its matrix instruction SMMLA.
#if defined(__x86_64__)
namespace isa_v4vnni {
void multiply_dots(const IntegerBlock& block);
}
#elif defined(__aarch64__)
namespace isa_neondot {
void multiply_dots(const IntegerBlock& block);
}
namespace isa_neonbf16 {
void multiply_dots(const IntegerBlock& block);
}
#endif

}  // namespace kernel_pytorch::int8_matmul
