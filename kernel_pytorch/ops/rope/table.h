// Positions on the host: where a token stands, and whether the table has a row for it.
#pragma once

#include <cstdint>

#include "kernel_pytorch/base/error.h"
#include "kernel_pytorch/ops/rope/operation.h"

namespace kernel_pytorch::rope {

inline int64_t position_of(const Problem& problem, int64_t batch, int64_t place) {
  const TensorView& positions = problem.positions;
  if (!positions.is_present()) return place;
  const int64_t offset = batch * positions.strides[0] + place * positions.strides[1];
  return positions.dtype == DType::kInt64 ? positions.as<int64_t>()[offset] : positions.as<int32_t>()[offset];
}

// Throws kInvalidArgument naming the first that has no row.
inline void check_positions_in_table(const Problem& problem) {
  if (!problem.positions.is_present() || !problem.cos.is_present()) return;
  const int64_t rows = problem.cos.sizes[1];
  for (int64_t batch = 0; batch < problem.batch(); ++batch) {
    for (int64_t place = 0; place < problem.sequence(); ++place) {
      const int64_t position = position_of(problem, batch, place);
      KP_CHECK(position >= 0 && position < rows, "rope: positions[", batch, ", ", place, "] is ", position,
               ", cos has ", rows, " rows; it must be one of them");
    }
  }
}

}  // namespace kernel_pytorch::rope
