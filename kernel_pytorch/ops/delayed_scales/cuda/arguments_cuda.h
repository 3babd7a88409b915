// What host and device agree on for delayed scales: the lists, in the kernel's parameters.
#pragma once

#include "kernel_pytorch/base/fixed_width.h"
#include "kernel_pytorch/ops/support/tensor_list_cuda.h"

namespace kernel_pytorch::delayed_scales {

inline constexpr int kThreads = 256;
inline constexpr int kMaxLayers = 512;

struct Arguments {
  float* amax[kMaxLayers];
  float* scales[kMaxLayers];
  float* histories;
  const float* factors;
  const float* joined;  // or null
  int64_t all;          // numbers of a step
  int64_t first;        // the place of this launch's first number
  int32_t count;        // numbers of this launch
  int32_t elements;     // of a layer
  int32_t steps;
  float least, most;
};
static_assert(sizeof(Arguments) <= kMaxKernelParameterBytes);

}  // namespace kernel_pytorch::delayed_scales
