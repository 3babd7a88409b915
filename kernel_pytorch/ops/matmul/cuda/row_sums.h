// Sums over the rows of a 16-bit a on the GPU by a launch of their own: for kernels that do not take them along, and
// alone, as the kernel of a product without columns (a bias' gradient by itself).
#pragma once

#include <vector>

#include "kernel_pytorch/device/device_code.h"
#include "kernel_pytorch/ops/matmul/operation.h"

namespace kernel_pytorch::matmul {

// Fills row_sums of a problem whose a has aligned rows. The bits are the same in every run.
void sum_rows(const Product& problem, Context& context);
std::vector<DeviceCode> row_sums_device_code();

}  // namespace kernel_pytorch::matmul
