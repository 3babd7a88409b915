// What crosses from the host side of the CPU kernel to the code built per instruction level (cpu/isa.h says why).
#pragma once

#include "kernel_pytorch/base/fixed_width.h"
#include "kernel_pytorch/ops/support/cpu_levels.h"

namespace kernel_pytorch::paged_attention {

inline constexpr int64_t kTileKeys = 32;  // of a step
inline constexpr int64_t kTileRows = 64;  // at most, of a task, of all its key heads
// Up to so many rows a step reads the cache itself: each key once, or twice where registers are few. For more rows
// fp32 copies, which stay in L1 and L2, cost less.
inline constexpr int64_t kDirectRows = 8;
inline constexpr int64_t kRowAlignment = 16;  // floats to which rows of queries and outputs are padded with zeros

// Rows of the cache as fp32, padded with zeros.
struct CopyArguments {
  const void* const* rows = nullptr;
  int64_t count = 0;
  int64_t columns = 0, pitch = 0;
  float* to = nullptr;
};

// Scores of some rows with the keys of a tile, and the softmax so far: largest score, sum of exponentials and weighted
// values, rescaled where the largest grows.
struct StepArguments {
  const float* queries = nullptr;  // [rows][pitch]
  int64_t rows = 0;
  int64_t count = 0;                    // keys; those from there on are hidden by `keeps`
  const void* const* keys = nullptr;    // [kTileKeys], all readable: `columns` numbers each
  const void* const* values = nullptr;  // [kTileKeys], `value_columns` each
  int64_t columns = 0, value_columns = 0;
  int64_t pitch = 0, value_pitch = 0;
  const void* const* next_keys = nullptr;  // of the next step: fetched meanwhile; null: none
  const void* const* next_values = nullptr;
  float scale = 1;                      // of scores, with the keys' own where all have one
  float value_scale = 1;                // of values, where all have one
  const float* key_scales = nullptr;    // [kTileKeys], or null
  const float* value_scales = nullptr;  // [kTileKeys], or null
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
  void (*step[5])(const StepArguments&);
  void (*store[3])(const float* from, float factor, int64_t count, void* to);  // fp32, bf16, fp16
};

KP_EACH_CPU_LEVEL(extern const TileKernels kTileKernels;)

}  // namespace kernel_pytorch::paged_attention
