// What crosses from the host side of the CPU kernel to the code built per instruction level (cpu/isa.h says why).
#pragma once

#include "kernel_pytorch/base/fixed_width.h"
#include "kernel_pytorch/ops/support/cpu_levels.h"

namespace kernel_pytorch::paged_attention {

inline constexpr int64_t kTileKeys = 32;  // of a step: their fp32 copies and those of their values stay in L1 and L2
inline constexpr int64_t kTileRows = 64;  // at most, of a task
inline constexpr int64_t kRowAlignment = 16;  // floats to which rows of copies are padded with zeros

// Rows of the cache as fp32, times their scales, padded with zeros. A null row becomes zeros.
struct CopyArguments {
  const void* const* rows = nullptr;
  const float* scales = nullptr;
  int64_t count = 0;
  int64_t columns = 0, pitch = 0;
  float* to = nullptr;
};

// Scores of some rows with the keys of a tile, and the softmax so far: largest score, sum of exponentials and weighted
// values, rescaled where the largest grows.
struct StepArguments {
  const float* queries = nullptr;  // [rows][pitch]
  int64_t rows = 0;
  const float* keys = nullptr;    // [kTileKeys][pitch]
  const float* values = nullptr;  // [kTileKeys][value_pitch]
  int64_t pitch = 0, value_pitch = 0;
  float scale = 1;
  float softcap = 0;
  const float* slopes = nullptr;     // of the rows, or null
  const float* distances = nullptr;  // of the rows: the tile's first key - position
  const float* bases = nullptr;      // of the rows: scores lack slope * base, the least that ALiBi takes off
  const uint8_t* keeps = nullptr;    // [rows][kTileKeys], or null where all are kept
  float* largest = nullptr;          // [rows], -inf before the first
  float* sums = nullptr;             // [rows]
  float* outputs = nullptr;          // [rows][value_pitch]
};

struct TileKernels {
  void (*copy[5])(const CopyArguments&);  // fp32, bf16, fp16, e4m3, int8
  void (*step)(const StepArguments&);
};

KP_EACH_CPU_LEVEL(extern const TileKernels kTileKernels;)

}  // namespace kernel_pytorch::paged_attention
