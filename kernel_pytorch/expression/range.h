// Which integers a program's nodes can be: on a GPU 32 bits are half the work of 64, and a dividend that cannot be
// negative needs no rounding down.
#pragma once

#include <cstdint>
#include <limits>
#include <vector>

#include "kernel_pytorch/expression/expression.h"

namespace kernel_pytorch::expression {

struct Range {
  int64_t low = std::numeric_limits<int64_t>::min();
  int64_t high = std::numeric_limits<int64_t>::max();
  bool fits_32_bits() const {
    return low >= std::numeric_limits<int32_t>::min() && high <= std::numeric_limits<int32_t>::max();
  }
};

// What the inputs may be: kernels refuse more.
inline constexpr int64_t kMaxPosition = int64_t{1} << 30;  // of a query or key
inline constexpr int64_t kMaxBatchOrHead = int64_t{1} << 20;

// One a node; that of a node that is no integer means nothing.
std::vector<Range> ranges_of(const Program& program);

}  // namespace kernel_pytorch::expression
