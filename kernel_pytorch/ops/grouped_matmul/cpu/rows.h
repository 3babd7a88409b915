// What the host side of the CPU kernels and the code built per instruction level share: plain values, no functions.
#pragma once

#include <cstdint>

#include "kernel_pytorch/base/dtype.h"
#include "kernel_pytorch/ops/engines/pointwise/kind_cuda.h"
#include "kernel_pytorch/ops/support/cpu_levels.h"

namespace kernel_pytorch::grouped_matmul {

struct RowMemory {
  void* data = nullptr;  // null: absent
  DType dtype = DType::kFloat32;
  int64_t stride = 0;
};

// Rows of fp32 sums of a gated product become rows of the output, and as they are those of the preactivation.
struct GateTask {
  const float* sums = nullptr;  // dense
  int64_t rows = 0, columns = 0;
  bool is_packed = false;
  pointwise::Kind activation = pointwise::Kind::kSilu;
  float limit = 0, slope = 0;
  RowMemory output{}, preactivation{};
};

// totals[j] = the sum over rows of factor * row[j]: floats, in the rows' order.
struct SumTask {
  RowMemory from{};
  const int32_t* lines = nullptr;  // null: one after another
  const float* factors = nullptr;  // null: ones
  int64_t rows = 0, columns = 0;
  float* totals = nullptr;
};

KP_EACH_CPU_LEVEL(void gate_rows(const GateTask& task);)
KP_EACH_CPU_LEVEL(void sum_rows(const SumTask& task);)

}  // namespace kernel_pytorch::grouped_matmul
