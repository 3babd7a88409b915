// What host and device agree on for a step of AdamW: the list of parameters, in the kernel's parameters.
#pragma once

#include "kernel_pytorch/base/fixed_width.h"
#include "kernel_pytorch/ops/support/tensor_list_cuda.h"

namespace kernel_pytorch::adamw {

inline constexpr int kMaxParameters = 400;
inline constexpr int kThreads = 256;
inline constexpr int kUnitElements = 4;  // that a thread takes at once: 16 bytes of fp32

struct Entry {
  void* parameter;
  const void* gradient;
  void* exp_avg;
  void* exp_avg_sq;
  void* max_exp_avg_sq;  // null: no amsgrad
  float* master;         // null: none
  float* step;
  int64_t elements;
  uint64_t random_block;  // Philox block of the first element
  int32_t block_end;      // thread blocks of this entry and of those before it
  bool is_aligned;        // every tensor to a unit
};

struct Arguments {
  Entry entries[kMaxParameters];
  int32_t count;
  uint32_t* arrived;      // blocks that have read their step
  const int64_t* seed;    // null: round to nearest
  const float* lr_value;  // null: lr; likewise
  const float* grad_scale;
  const float* found_inf;
  const float* total_norm;
  float lr;
  float first;   // 1 - beta1
  float second;  // 1 - beta2
  float beta2;
  float log_beta1;
  float log_beta2;
  float eps;
  float weight_decay;
  float max_norm;
  bool maximize;
};
static_assert(sizeof(Arguments) <= kMaxKernelParameterBytes);

}  // namespace kernel_pytorch::adamw
