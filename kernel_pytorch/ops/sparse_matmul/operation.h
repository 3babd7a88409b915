// The product with a 2:4 weight as the registry sees it, and the kernels that its list names. In a problem x and output
// are matrices.
#pragma once

#include "kernel_pytorch/ops/sparse_matmul/sparse_matmul.h"
#include "kernel_pytorch/registry/kernel.h"

namespace kernel_pytorch::sparse_matmul {

void check(Product& problem, Device device);

extern const registry::Operation<Product> kProduct;
extern const registry::Kernel<Product> kSm90, kCpu, kComposed, kReference;

}  // namespace kernel_pytorch::sparse_matmul
