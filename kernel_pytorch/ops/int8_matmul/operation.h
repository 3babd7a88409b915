// The product of 8-bit integers as the registry sees it, and the kernels that its list names. In a problem x and output
// are matrices and scale_x is a row.
#pragma once

#include <algorithm>

#include "kernel_pytorch/ops/int8_matmul/int8_matmul.h"
#include "kernel_pytorch/registry/kernel.h"

namespace kernel_pytorch::int8_matmul {

void check(Product& problem, Device device);

extern const registry::Operation<Product> kProduct;
extern const registry::Kernel<Product> kCudaMma, kCpuDots, kCpu, kReference;

inline constexpr int64_t kMostColumns = 65536;  // of a sum in int32
inline constexpr float kLeastScale = 0x1p-100f;

// Columns that are summed as int32: a group, or part of a row.
inline int64_t block_of(const Product& problem) {
  return problem.group == 0 ? kMostColumns : problem.group;
}
inline bool has_codes(const Product& problem) {
  return problem.x.dtype == DType::kInt8;
}

}  // namespace kernel_pytorch::int8_matmul
