// What host and device agree on for an optimizer's step: the list of parameters, in the kernel's parameters.
#pragma once

#include "kernel_pytorch/ops/optimizer_step/dynamic_map_cuda.h"
#include "kernel_pytorch/ops/optimizer_step/factors_cuda.h"
#include "kernel_pytorch/ops/support/tensor_list_cuda.h"

namespace kernel_pytorch::optimizer_step {

inline constexpr int kMaxParameters = 370;
inline constexpr int kThreads = 256;

// Consecutive elements that a thread takes at once: 16 bytes of fp32 states, 8 of codes.
constexpr int unit_elements(Storage storage) {
  return storage == Storage::kFloat ? 4 : 8;
}

struct Entry {
  void* parameter;
  const void* gradient;
  uint8_t* correction;  // null: none
  void* first;          // null: sgd without momentum
  void* second;
  float* first_scale;
  float* second_scale;
  float* step;
  int64_t elements;
  int32_t block_end;  // thread blocks of this entry and of those before it
  bool is_aligned;    // every tensor to a unit, or to 16 bytes of one
};

struct Arguments {
  Entry entries[kMaxParameters];
  int32_t count;
  uint32_t* arrived;      // blocks that have read their step
  const float* lr_value;  // null: lr; likewise
  const float* grad_scale;
  const float* found_inf;
  const float* total_norm;
  Rates rates;
};
static_assert(sizeof(Arguments) <= kMaxKernelParameterBytes);

}  // namespace kernel_pytorch::optimizer_step
