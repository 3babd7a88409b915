// What crosses from the host side of the CPU kernels to the code built per instruction level.
#pragma once

#include "kernel_pytorch/base/fixed_width.h"
#include "kernel_pytorch/ops/support/cpu_levels.h"

namespace kernel_pytorch::causal_conv1d {

inline constexpr int64_t kBlockChannels = 256;  // of a task; their weights are turned into one row per tap

// Neighbouring channels of tokens of one sequence: pointers are at the first channel, of token 0 where there are
// tokens.
struct Part {
  const void *x = nullptr, *grad_output = nullptr;  // of token `token` begin token * stride elements behind
  int64_t x_stride = 0, grad_stride = 0, output_stride = 0, state_stride = 0;
  const void *initial = nullptr, *grad_final = nullptr;  // null: zeros
  const void *weight = nullptr, *bias = nullptr;         // bias: null: none
  int64_t channels = 0, width = 0;
  int64_t first = 0, last = 0;  // its tokens
  int64_t begin = 0, end = 0;   // the sequence's
  bool silu = false;
  void* output = nullptr;                              // or the gradient of x
  void* grad_initial = nullptr;                        // null: not wanted
  float *grad_weight = nullptr, *grad_bias = nullptr;  // fp32 [width, kBlockChannels], [kBlockChannels]: written
};

struct ConvKernels {
  void (*forward)(const Part& part);
  void (*backward)(const Part& part);
};

// By type: fp32, bf16, fp16.
KP_EACH_CPU_LEVEL(extern const ConvKernels kConvKernels[3];)

}  // namespace kernel_pytorch::causal_conv1d
