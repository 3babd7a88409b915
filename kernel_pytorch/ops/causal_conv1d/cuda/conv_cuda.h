// What host and device agree on for the causal convolution.
#pragma once

#include "kernel_pytorch/base/fixed_width.h"

namespace kernel_pytorch::causal_conv1d {

struct ConvArguments {
  const void *x, *grad_output;  // of a token token_stride elements behind the one before
  int64_t x_batch_stride, x_stride, grad_batch_stride, grad_stride;
  const void *weight, *bias, *initial, *grad_final;  // bias, initial and grad_final: null: zeros
  void *output, *final;                              // output: or the gradient of x
  void *grad_weight, *grad_bias, *grad_initial;      // the last two: null: not wanted
  float* sums;                                       // fp32 [batch * parts, width + 1, channels]: of weights and bias
  const void* offsets;                               // of packed sequences; null: a batch
  int64_t batch, tokens, channels, sequences, parts;
  bool offsets_are_wide, silu;
};

inline constexpr int kThreads = 128;    // a thread takes one channel
inline constexpr int kPartTokens = 32;  // of one batch entry, which a thread goes through
inline constexpr int kSumThreads = 128;

}  // namespace kernel_pytorch::causal_conv1d
