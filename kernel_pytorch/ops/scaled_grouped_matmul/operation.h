// The scaled grouped product as the registry sees it. In a problem the scales have the dimensions below, with one
// element and stride 0 where one serves all.
#pragma once

#include "kernel_pytorch/base/rows.h"
#include "kernel_pytorch/ops/scaled_grouped_matmul/scaled_grouped_matmul.h"
#include "kernel_pytorch/registry/kernel.h"

namespace kernel_pytorch::scaled_grouped_matmul {

inline constexpr int64_t kBlock = 128;

inline int64_t rows_of(const Product& problem) {
  return problem.output.sizes[0];
}
inline int64_t blocks_of(int64_t size) {
  return (size + kBlock - 1) / kBlock;
}

// scale_a [rows of a, blocks of k]; scale_b [groups, rows or blocks of rows of a matrix, blocks of k].
inline int64_t rows_of_b_scale(const Product& problem) {  // of a matrix, that have one scale
  const int64_t scales = problem.scale_b.sizes[1], n = problem.b.sizes[1];
  return scales == n ? 1 : scales == 1 ? n : kBlock;
}
// Whether sums are scaled after every 128 of k.
inline bool is_blocked(const Product& problem) {
  return problem.scale_a.sizes[1] > 1 || problem.scale_b.sizes[2] > 1 || rows_of_b_scale(problem) == kBlock;
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

// Throws what multiply() throws; leaves the problem as described above.
void check(Product& problem, Device device);

extern const registry::Operation<Product> kProduct;
extern const registry::Kernel<Product> kSm90, kCpu, kReference;

}  // namespace kernel_pytorch::scaled_grouped_matmul
