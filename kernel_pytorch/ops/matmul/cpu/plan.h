// The host side of the CPU kernels, with any table of theirs: the registry's kernels, and tests of those that this
// machine cannot run.
#pragma once

#include "kernel_pytorch/ops/matmul/cpu/tiles.h"
#include "kernel_pytorch/ops/matmul/operation.h"

namespace kernel_pytorch::matmul {

void run_packed(const Product& problem, const ProductKernels& kernels, Context& context);
// fp32 rows that are read as they lie; why a problem is not of these, or null.
void run_rows(const Product& problem, Context& context);
const char* why_not_rows(const Product& problem, const DeviceInfo& device);
// At most kThinRows rows or columns.
void run_thin(const Product& problem, Context& context);
bool is_thin(const Product& problem);
// Up to 64 of bf16, which dot products of pairs take at once.
bool is_panel(const Product& problem, CpuIsa isa);

// One matrix of a batch.
Operand operand_of(const TensorView& view, int64_t batch);
// What follows the sums, seen from a row and a column of the product.
Epilogue epilogue_of(const Product& problem, int64_t batch, int64_t row, int64_t column);
// All rows' sums, in the type that they are wanted in.
void write_row_sums(const Product& problem, Context& context);

}  // namespace kernel_pytorch::matmul
