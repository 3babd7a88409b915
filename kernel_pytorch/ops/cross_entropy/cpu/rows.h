// What crosses from the host side of the CPU kernels to the code built per instruction level: plain pointers and
// strides, no class with functions (cpu/isa.h says why). Rows have unit column stride.
#pragma once

#include "kernel_pytorch/base/fixed_width.h"
#include "kernel_pytorch/ops/support/cpu_levels.h"

namespace kernel_pytorch::cross_entropy {

struct Rows {
  int64_t rows = 0;
  int64_t columns = 0;
  int64_t first_column = 0;
  const void* logits = nullptr;  // first row of the block; likewise below
  int64_t logits_stride_elements = 0;
  const void* target = nullptr;
  bool target_is_wide = true;  // int64, not int32
  int64_t ignore_index = 0;
  const float* weight = nullptr;     // of the whole vocabulary; null: ones
  const float* given_lse = nullptr;  // backward: nothing is reduced
  const float* grad_loss = nullptr;  // backward
  int64_t grad_loss_step = 0;        // 0: one for all rows
  float* loss = nullptr;             // null: not wanted, likewise below
  float* lse = nullptr;
  float* partials = nullptr;
  void* gradient = nullptr;
  float label_smoothing = 0;
  float share = 0;  // label_smoothing / vocabulary
  float weight_sum = 0;
  float z_loss = 0;
  float softcap = 0;           // 0: none
  float scale = 1;             // of the gradient
  float* buffer = nullptr;     // [columns], 64-byte aligned
  bool stream_stores = false;  // the gradient past the caches; its rows are then 64-byte aligned
};

struct RescaleRun {
  int64_t elements = 0;
  void* tensor = nullptr;
  float factor = 1;
};

enum class Types : int { kFloat, kBFloat16, kFloat16 };
inline constexpr int kTypesCount = 3;

struct RowKernels {
  void (*rows)(const Rows&);
  void (*rescale)(const RescaleRun&);
};

// One table per instruction level, defined by cross_entropy/cpu/kernel_isa.cpp; indexed by Types.
KP_EACH_CPU_LEVEL(extern const RowKernels kRowKernels[kTypesCount];)

}  // namespace kernel_pytorch::cross_entropy
