// A grouped product of rows as a launch of the wgmma kernel, for ops that add to its epilogue.
#pragma once

#include "kernel_pytorch/ops/engines/gemm/sm90/host.h"
#include "kernel_pytorch/ops/grouped_matmul/grouped_matmul.h"

namespace kernel_pytorch::grouped_matmul {

struct Sm90Rows {
  product::Sm90Variant variant;
  product::Sm90Tensors tensors;
  product::Sm90Sizes sizes;
  product::Sm90Arguments arguments;
};
// Of a checked problem that kSm90 supports.
Sm90Rows sm90_rows(const Product& problem, int config);

}  // namespace kernel_pytorch::grouped_matmul
