// What host and device agree on for the sums over rows of a, which a kernel that never sees whole rows leaves to its
// own launch.
#pragma once

#include "kernel_pytorch/base/fixed_width.h"

namespace kernel_pytorch::matmul {

inline constexpr int kRowSumThreads = 256;
inline constexpr int kRowSumWidth = 256;  // rows of a that a block sums where they lie side by side in memory
inline constexpr int kRowSumLanes = 8;    // threads that share a row's k there

struct RowSumArguments {
  const void* a;
  int64_t stride;   // of the dimension that is not dense
  float* partials;  // [slices, m]
  void* totals;     // [m], where k is dense: written at once
  int32_t m, k;
  int32_t slice;  // of k
  bool float_totals;
};

}  // namespace kernel_pytorch::matmul
