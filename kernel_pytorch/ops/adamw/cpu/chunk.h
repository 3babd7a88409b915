// What crosses from the host side of the CPU kernel to the code built per instruction level (cpu/isa.h says why).
#pragma once

#include "kernel_pytorch/base/fixed_width.h"
#include "kernel_pytorch/ops/support/cpu_levels.h"

namespace kernel_pytorch::adamw {

// A stretch of one parameter's elements; pointers to its first, which is a multiple of 8 elements from the beginning.
struct ChunkArguments {
  int64_t count = 0;
  void* parameter = nullptr;
  const void* gradient = nullptr;
  void* exp_avg = nullptr;
  void* exp_avg_sq = nullptr;
  void* max_exp_avg_sq = nullptr;  // null: no amsgrad
  float* master = nullptr;         // null: none
  float gradient_factor = 1;
  float keep = 1;
  float step_size = 0;
  float root = 1;
  float first = 0;   // 1 - beta1
  float second = 0;  // 1 - beta2
  float beta2 = 0;
  float eps = 0;
  bool is_stochastic = false;
  int32_t prefetch_bytes = 0;  // how far ahead; 0: the hardware does it alone
  uint64_t seed = 0;
  uint64_t offset = 0;
  uint64_t block = 0;  // Philox block of the first element
};

// Pairs of (parameters' type, averages' type) that the kernels are built for.
enum class Types : int { kFloat, kFloatBFloat16, kBFloat16Float, kBFloat16, kFloat16Float, kFloat16 };
inline constexpr int kTypesCount = 6;

struct ChunkKernels {
  void (*update[kTypesCount])(const ChunkArguments&);
};

KP_EACH_CPU_LEVEL(extern const ChunkKernels kChunkKernels;)

}  // namespace kernel_pytorch::adamw
