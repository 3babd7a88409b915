// What host and device agree on for the norm of a list: the list itself, in the kernel's parameters.
#pragma once

#include "kernel_pytorch/base/fixed_width.h"
#include "kernel_pytorch/ops/support/tensor_list_cuda.h"

namespace kernel_pytorch::reduce_norm {

inline constexpr int kMaxTensors = 1024;
inline constexpr int kThreads = 256;
inline constexpr int kBlockElements = 16384;

enum class Element : uint8_t { kFloat, kBFloat16, kFloat16 };

struct Arguments {
  const void* data[kMaxTensors];
  int64_t elements[kMaxTensors];
  int32_t chunk_end[kMaxTensors];  // chunks of this tensor and of those before it
  Element type[kMaxTensors];
  int32_t tensors;
  int32_t first_partial;  // chunks of earlier launches
  int32_t all_partials;   // chunks of all launches
  float* partials;        // one for each chunk
  uint32_t* arrived;      // null except in the last launch
  float* output;
};
static_assert(sizeof(Arguments) <= kMaxKernelParameterBytes);

}  // namespace kernel_pytorch::reduce_norm
