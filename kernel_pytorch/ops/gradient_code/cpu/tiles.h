// What crosses from the host side of the CPU kernels to the code built per instruction level (cpu/isa.h says why): a
// tile of 256 numbers, or the first `count` of one, whose codes and scales are whole.
#pragma once

#include "kernel_pytorch/base/fixed_width.h"
#include "kernel_pytorch/ops/gradient_code/code_cuda.h"
#include "kernel_pytorch/ops/support/cpu_levels.h"

namespace kernel_pytorch::gradient_code {

struct EncodeTile {
  const void* x;
  float* error;  // or null
  int64_t count;
  uint8_t* codes;
  float* scales;
  bool carries;
  float gain;
};
struct DecodeTile {
  const uint8_t* codes;  // of the first row
  const float* scales;
  int64_t code_stride, scale_stride, rows;  // of a mean; else one row
  void* output;
  int64_t count;
  bool is_mean, adds;
};

struct CodeKernels {
  void (*encode[3][kCodes])(const EncodeTile& tile);  // by type: fp32, bf16, fp16
  void (*decode[3][kCodes])(const DecodeTile& tile);
};
KP_EACH_CPU_LEVEL(extern const CodeKernels kCodeKernels;)

}  // namespace kernel_pytorch::gradient_code
