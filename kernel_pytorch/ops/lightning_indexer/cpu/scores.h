// What crosses from the host side of the CPU kernel to the code built per instruction level (cpu/isa.h says why). Rows
// of floats are padded to kPadding elements, zeros behind the last.
#pragma once

#include "kernel_pytorch/base/fixed_width.h"
#include "kernel_pytorch/ops/support/cpu_levels.h"

namespace kernel_pytorch::lightning_indexer {

inline constexpr int64_t kPadding = 16;
inline constexpr int64_t kTileKeys = 64;  // a multiple of four

struct ScoreTask {
  const float* query;    // [heads][padded]
  const float* weights;  // [heads]
  const float* keys;     // [kTileKeys][padded]
  int64_t heads, padded;
  float* scores;  // [kTileKeys]
};
struct ScoreKernels {
  void (*score)(const ScoreTask& task);
  void (*load[4])(const void* from, int64_t count, float* to);  // fp32, bf16, fp16, e4m3 to floats, padded
};
KP_EACH_CPU_LEVEL(extern const ScoreKernels kScoreKernels;)

}  // namespace kernel_pytorch::lightning_indexer
