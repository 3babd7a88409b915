// What the host side of the CPU kernels and the code built per instruction level share: plain values, no functions.
#pragma once

#include <cstdint>

#include "kernel_pytorch/base/dtype.h"
#include "kernel_pytorch/ops/engines/pointwise/kind_cuda.h"
#include "kernel_pytorch/ops/support/cpu_levels.h"

namespace kernel_pytorch::moe_mlp {

// to[j] = the sum over rows of factor * row[j], in their order. Rows are pointers; their types are to's.
struct CombineTask {
  const void* const* rows = nullptr;
  const float* factors = nullptr;
  int64_t count = 0, columns = 0;
  void* to = nullptr;
};

// to[j] = factor * from[j] (where `to` is there), and the result the dot product of from and with.
struct ScaleTask {
  const void* from = nullptr;
  const void* with = nullptr;
  int64_t columns = 0;
  float factor = 1;
  void* to = nullptr;
};

// A row of moe_activation_backward; the result is the dot product of gradient and activation.
struct ActivateTask {
  const void* gradient = nullptr;
  const void* preactivation = nullptr;
  int64_t inner = 0;
  bool is_gated = false, is_packed = false;
  pointwise::Kind activation = pointwise::Kind::kSilu;
  float limit = 0, slope = 0, weight = 1;
  void* grad_preactivation = nullptr;
  void* hidden = nullptr;
};

struct RowKernels {
  void (*combine)(const CombineTask& task) = nullptr;
  float (*scale)(const ScaleTask& task) = nullptr;
  float (*activate)(const ActivateTask& task) = nullptr;
  float (*dot_floats)(const void* row, const float* floats, int64_t columns) = nullptr;  // a bias in fp32
};
// fp32, bf16, fp16.
KP_EACH_CPU_LEVEL(extern const RowKernels kRowKernels[3];)

}  // namespace kernel_pytorch::moe_mlp
