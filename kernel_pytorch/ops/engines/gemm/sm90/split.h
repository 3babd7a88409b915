// Host side of split.cuh: operands of fp32 as wgmma takes them.
#pragma once

#include <vector>

#include "kernel_pytorch/base/tensor_view.h"
#include "kernel_pytorch/device/context.h"
#include "kernel_pytorch/device/device_code.h"

namespace kernel_pytorch::product {

struct SplitOperand {
  TensorView source;           // [batch, rows, k], one of the last two dense
  bool parts;                  // else rounded to tf32
  int32_t* careful = nullptr;  // of parts
  float* row_sums = nullptr;   // of one batch: [split_chunks, rows]
};

// k rounded up to whole groups of parts.
int64_t split_depth(int64_t k);
// How many partial sums of a row there are.
int64_t split_chunks(const TensorView& source);
// Null, or why the sizes are beyond the launch.
const char* split_obstacle(const TensorView& source);

// [batch, rows, split_depth] in scratch memory, with parts twice the depth.
TensorView split_operand(const SplitOperand& operand, Context& context);

std::vector<DeviceCode> split_device_code();
uint64_t split_source_hash();

}  // namespace kernel_pytorch::product
