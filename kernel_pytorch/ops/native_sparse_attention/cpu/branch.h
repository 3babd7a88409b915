// What crosses from the host side of the CPU kernels to the code built per instruction level (cpu/isa.h says why): one
// branch of one token, for all heads that read one key head. Its keys are any rows of a tensor, named by their numbers.
//
// Rows of floats that the host makes are padded to kPadding elements, zeros behind the last; those of scores too.
#pragma once

#include "kernel_pytorch/base/fixed_width.h"
#include "kernel_pytorch/ops/support/cpu_levels.h"

namespace kernel_pytorch::native_sparse_attention {

inline constexpr int64_t kPadding = 16;
[[gnu::always_inline]] constexpr int64_t padded(int64_t count) {
  return (count + kPadding - 1) / kPadding * kPadding;
}

struct KeyRows {
  const void *key, *value;
  int64_t key_stride, value_stride;  // in elements
  const int32_t* rows;               // the numbers of the rows that are seen
  int64_t count;
};
struct Heads {
  int64_t heads, size, value_size;
  const float* query;  // [heads][padded size], scaled
  const float* gates;  // [heads]
};
struct ForwardTask {
  Heads of;
  KeyRows keys;
  float* scores;      // [heads][padded count]
  float* importance;  // [padded count], or null: the heads' probabilities are added to it
  float* output;      // [heads][padded value_size], or null: added to
  float* lse;         // [heads]
};
struct BackwardTask {
  Heads of;
  KeyRows keys;
  const float* grad_output;  // [heads][padded value_size]
  const float* lse;
  float *scores, *differences;     // [heads][padded count]
  float* grad_query;               // [heads][padded size]: added to, without the scale
  float *grad_keys, *grad_values;  // rows as `rows` names them, padded: added to
  float* grad_gates;               // [heads]
};
struct BranchKernels {
  void (*attend)(const ForwardTask& task);
  void (*differentiate)(const BackwardTask& task);
  void (*load)(const void* from, int64_t count, float scale, float* to);
  void (*store)(const float* from, int64_t count, float scale, void* to);
  void (*mean)(const void* first, int64_t stride, int64_t rows, int64_t count, float* to);
  void (*add)(const float* from, int64_t count, float scale, float* to);  // to += scale * from
};
// By type: fp32, bf16, fp16.
KP_EACH_CPU_LEVEL(extern const BranchKernels kBranchKernels[3];)

}  // namespace kernel_pytorch::native_sparse_attention
