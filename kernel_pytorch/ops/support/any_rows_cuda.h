// Rows of any strides as a kernel is given them: any alignment, any number of leading dimensions.
#pragma once

#include "kernel_pytorch/base/fixed_width.h"

namespace kernel_pytorch {

inline constexpr int kAnyRank = 8;

struct AnyShape {
  int64_t rows;
  int64_t columns;
  int64_t leading[kAnyRank];  // sizes of the leading dimensions, outermost first
  int32_t leading_count;
};

// Strides in elements: the leading dimensions', then the columns'. Absent: data is null.
struct AnyTensor {
  const void* data;
  int64_t leading_strides[kAnyRank];
  int64_t column_stride;
};

}  // namespace kernel_pytorch
