// Grouped products with weights in few bits as the registry sees them, and the kernels that their list names.
#pragma once

#include "kernel_pytorch/ops/quantized_grouped_matmul/quantized_grouped_matmul.h"
#include "kernel_pytorch/registry/kernel.h"

namespace kernel_pytorch::quantized_grouped_matmul {

void check(Product& problem, Device device);

extern const registry::Operation<Product> kProduct;
extern const registry::Kernel<Product> kCudaMma, kCpu, kComposed, kReference;

inline int64_t groups_of(const Product& problem) {
  return problem.offsets.sizes[0];
}
inline int64_t columns_of(const Product& problem) {
  return problem.output.sizes[1];
}
// Rows [begin, end) of a group, of offsets that the host may read.
struct Range {
  int64_t begin, end;
  int64_t count() const { return end - begin; }
};
inline Range range_of(const Product& problem, int64_t group) {
  const int32_t* ends = problem.offsets.as<const int32_t>();
  return {group == 0 ? 0 : ends[group - 1], ends[group]};
}

}  // namespace kernel_pytorch::quantized_grouped_matmul
