// What host and device agree on for the sums of partial rows.
#pragma once

#include "kernel_pytorch/base/fixed_width.h"

namespace kernel_pytorch {

struct ColumnSumArguments {
  const float* partials[2];  // [count, columns] each; null: not wanted
  void* totals[2];
  int64_t columns;
  int32_t count;
};

inline constexpr int kSumColumns = 32;  // a block sums this many columns
inline constexpr int kSumStrips = 16;   // with this many threads each

}  // namespace kernel_pytorch
