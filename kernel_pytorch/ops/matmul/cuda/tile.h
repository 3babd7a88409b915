// A product as the plain kernel, and whatever finishes sums as it does, is given it.
#pragma once

#include "kernel_pytorch/ops/engines/gemm/tile/host.h"
#include "kernel_pytorch/ops/matmul/operation.h"

namespace kernel_pytorch::matmul {

product::TileArguments tile_arguments(const Product& problem);

}  // namespace kernel_pytorch::matmul
