// What crosses from the host side of the CPU kernels to the code built per instruction level: plain pointers and
// strides, no class with functions (cpu/isa.h says why). Rows have unit column stride.
#pragma once

#include "kernel_pytorch/ops/softmax/cuda/arguments_cuda.h"
#include "kernel_pytorch/ops/support/cpu_levels.h"

namespace kernel_pytorch::softmax {

struct ForwardRows {
  int64_t rows = 0;
  int64_t columns = 0;
  int64_t visible = 0;      // columns before this one count, the others are removed
  const void* x = nullptr;  // first row of the block; likewise below
  const void* mask = nullptr;
  void* output = nullptr;
  int64_t x_stride_elements = 0;
  int64_t mask_stride_elements = 0;
  float* buffer = nullptr;    // [2][buffer_stride], 64-byte aligned
  int64_t buffer_stride = 0;  // at least `columns`
  float scale = 1;
  MaskKind mask_kind = MaskKind::kNone;
  bool log = false;
  bool empty_is_zero = false;  // a row without scores gives zeros rather than NaN
  bool stream_stores = false;  // output past the caches; rows of output are then 64-byte aligned
};

struct BackwardRows {
  int64_t rows = 0;
  int64_t columns = 0;
  const void* grad_output = nullptr;
  const void* output = nullptr;
  void* grad_input = nullptr;
  int64_t grad_output_stride_elements = 0;
  int64_t output_stride_elements = 0;
  float scale = 1;
  bool log = false;
  bool masked = false;
  bool stream_stores = false;
};

enum class Types : int { kFloat, kBFloat16, kFloat16 };
inline constexpr int kTypesCount = 3;

struct RowKernels {
  void (*forward)(const ForwardRows&);
  void (*backward)(const BackwardRows&);
};

// One table per instruction level, defined by softmax/cpu/kernel_isa.cpp; indexed by Types.
KP_EACH_CPU_LEVEL(extern const RowKernels kRowKernels[kTypesCount];)

}  // namespace kernel_pytorch::softmax
