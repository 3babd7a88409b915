// The grouped products as the registry sees them. In a checked problem sizes of 1 have the strides of a dense tensor,
// and b is row-major (last stride 1) or column-major.
#pragma once

#include "kernel_pytorch/base/rows.h"
#include "kernel_pytorch/ops/grouped_matmul/grouped_matmul.h"
#include "kernel_pytorch/registry/kernel.h"

namespace kernel_pytorch::grouped_matmul {

inline bool is_row_major(const TensorView& matrices) {
  return matrices.strides[2] == 1;
}
inline int64_t rows_of(const Product& problem) {
  return problem.output.sizes[0];
}
inline int64_t rows_of(const WeightGradient& problem) {
  return problem.gather_a.is_present()   ? problem.gather_a.sizes[0]
         : problem.gather_b.is_present() ? problem.gather_b.sizes[0]
                                         : problem.a.sizes[0];
}
inline int64_t rows_of(const Sums& problem) {
  return problem.gather.is_present() ? problem.gather.sizes[0] : problem.x.sizes[0];
}

// The rows of a group, of offsets that the host may read.
struct Range {
  int64_t begin, end;
  int64_t count() const { return end - begin; }
};
inline Range range_of(const TensorView& offsets, int64_t group) {
  const int32_t* ends = offsets.as<const int32_t>();
  return {group == 0 ? 0 : ends[group - 1], ends[group]};
}

// Throw what the ops throw; leave the problem as described above.
void check(Product& problem, Device device);
void check(WeightGradient& problem, Device device);
void check(Sums& problem, Device device);

extern const registry::Operation<Product> kMultiply;
extern const registry::Operation<WeightGradient> kWeightGradient;
extern const registry::Operation<Sums> kSums;
extern const registry::Kernel<Product> kSm90, kMma, kTile, kCpu, kReference;
extern const registry::Kernel<WeightGradient> kWeightSm90, kWeightMma, kWeightTile, kWeightCpu, kWeightReference;
extern const registry::Kernel<Sums> kSumsCuda, kSumsCpu, kSumsReference;

}  // namespace kernel_pytorch::grouped_matmul
