// What crosses from the host side to thin_dots_isa.cpp.
#pragma once

#include "kernel_pytorch/ops/matmul/cpu/tiles.h"

namespace kernel_pytorch::matmul {

// Few rows of bf16 times columns of bf16, both of neighbours along k and as they lie: sums [count, columns] of fp32.
struct ThinDotsTask {
  Operand few{};  // [count, steps]
  int64_t count = 0;
  Operand many{};  // [steps, columns]
  int64_t steps = 0, columns = 0;
  float* sums = nullptr;
  int64_t sums_stride = 0;
};

#if defined(__x86_64__)
namespace isa_v4bf16 {
void multiply_thin_dots(const ThinDotsTask& task);
}
#endif

}  // namespace kernel_pytorch::matmul
