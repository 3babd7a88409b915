// What host and device agree on for the sums of partial rows.
#pragma once

#include "kernel_pytorch/base/fixed_width.h"

namespace kernel_pytorch {

struct ColumnSumArguments {
  const float* partials[2];  // [count, columns] each; null: not wanted
  void* totals[2];
  int64_t columns;
  int32_t count;
  int32_t block_columns;  // that a block sums: a power of two
};

inline constexpr int kSumThreads = 512;  // of a block, shared out evenly among its columns

}  // namespace kernel_pytorch
