// What crosses from the host side of the CPU selection to the code built per instruction level (cpu/isa.h says why).
#pragma once

#include "kernel_pytorch/base/fixed_width.h"
#include "kernel_pytorch/ops/support/cpu_levels.h"

namespace kernel_pytorch::block_list {

struct ScoreTask {
  const void* query;  // one mean
  const void* keys;   // `parts` means
  int64_t key_stride, size, parts, key_parts;
  int32_t columns;  // whose scores are wanted
  float* scores;
};
// By type: fp32, bf16, fp16.
inline constexpr int kScoreTypes = 3;
struct ScoreKernels {
  void (*score)(const ScoreTask& task);
};
KP_EACH_CPU_LEVEL(extern const ScoreKernels kScoreKernels[kScoreTypes];)

}  // namespace kernel_pytorch::block_list
