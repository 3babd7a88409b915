// The second step of a gradient that sums over rows: a backward kernel leaves partial rows in scratch memory, one per
// block, and one launch adds them in their order, so that the result is the same bits on every run.
#pragma once

#include <cstdint>
#include <vector>

#include "kernel_pytorch/base/tensor_view.h"
#include "kernel_pytorch/device/context.h"
#include "kernel_pytorch/device/device_code.h"

namespace kernel_pytorch {

// Two gradients of one type at most, as a weight's and a bias'.
struct ColumnSums {
  float* partials[2] = {nullptr, nullptr};  // [count, columns] each; null where the total is not wanted
  TensorView totals[2];                     // [columns]
  int64_t count = 0;
  int64_t columns = 0;
};

// Scratch memory for `count` partial rows of every total that is present.
ColumnSums allocate_column_sums(const TensorView& first, const TensorView& second, int64_t columns, int64_t count,
                                Context& context);
// Adds them up and rounds to the totals' type; may be scheduled before the kernel ahead has ended.
void add_column_sums(const ColumnSums& sums, Context& context);
// The sums of no rows.
void zero_column_sums(const TensorView& first, const TensorView& second, Context& context);
std::vector<DeviceCode> column_sums_device_code();
uint64_t column_sums_source_hash();

}  // namespace kernel_pytorch
