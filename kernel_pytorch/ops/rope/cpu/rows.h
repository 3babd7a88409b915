// What crosses from the host side of the CPU kernel to the code built per instruction level: the heads of one token,
// plain pointers and strides (cpu/isa.h says why). Columns have unit stride.
#pragma once

#include "kernel_pytorch/base/fixed_width.h"
#include "kernel_pytorch/ops/support/cpu_levels.h"

namespace kernel_pytorch::rope {

struct HeadRows {
  const void* input = nullptr;  // the first head
  void* output = nullptr;
  int64_t input_stride_elements = 0;  // from head to head
  int64_t output_stride_elements = 0;
  int64_t heads = 0;
  int64_t head_dim = 0;
  int64_t pairs = 0;
  const float* cos = nullptr;  // [pairs]
  const float* sin = nullptr;  // with the sign of the direction
  bool interleaved = false;
  bool copies_rest = false;    // columns past the pairs
  bool stream_stores = false;  // both halves of a head's pairs are then 64-byte aligned
};

// By element type: fp32, bf16, fp16.
inline constexpr int kTypesCount = 3;
struct RowKernels {
  void (*rotate)(const HeadRows&);
  void (*widen)(const void* from, float* to, int64_t count);
  void (*fence)();  // after the last of a task's streamed stores
};

KP_EACH_CPU_LEVEL(RowKernels row_kernels(int type);)

}  // namespace kernel_pytorch::rope
