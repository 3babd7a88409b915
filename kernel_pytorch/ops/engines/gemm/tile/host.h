// Host side of the plain matrix product on CUDA that ops/matmul and ops/scaled_matmul share.
#pragma once

#include <string>

#include "kernel_pytorch/base/tensor_view.h"
#include "kernel_pytorch/device/context.h"
#include "kernel_pytorch/device/device_code.h"
#include "kernel_pytorch/ops/engines/gemm/tile/tile_cuda.h"

namespace kernel_pytorch::product {

// One compiled kernel: a thread's sums along each side (4 or 8), and whether scales change along k.
struct TileVariant {
  DType a, b;
  int per_thread;
  bool blocked;
};

TileMatrix tile_matrix(const TensorView& view);  // [batch, rows, columns], the last dense, or absent

DeviceCode tile_code(const TileVariant& variant);
uint64_t tile_source_hash();
void tile_launch(const TileVariant& variant, int64_t batch, TileArguments& arguments, Context& context,
                 const std::string& label);

// By mma.m16n8k16, for 16-bit types whose rows begin at multiples of 16 bytes. Across: an operand's rows or columns are
// dense, not k.
struct MmaVariant {
  DType dtype;
  bool across_a, across_b;
};
DeviceCode mma_code(const MmaVariant& variant);
uint64_t mma_source_hash();
void mma_launch(const MmaVariant& variant, int64_t batch, TileArguments& arguments, Context& context,
                const std::string& label);

// By mma of FP8, for codes dense in k whose rows begin at multiples of 16 bytes. Promotes: sums leave the tensor cores'
// accumulators every 128 of k, and meet the scales of that block there.
struct Float8Variant {
  DType a, b;
  bool promotes;
};
DeviceCode float8_code(const Float8Variant& variant);
uint64_t float8_source_hash();
void float8_launch(const Float8Variant& variant, TileArguments& arguments, Context& context, const std::string& label);

// fp32 by mma of tf32, for rows that begin at multiples of 16 bytes: three products of split operands, or (once) one of
// operands cut off. Blocks are edge x edge, 128 or 64.
struct FloatVariant {
  int edge;
  bool across_a, across_b, once;
};
DeviceCode float_code(const FloatVariant& variant);
uint64_t float_source_hash();
void float_launch(const FloatVariant& variant, int64_t batch, TileArguments& arguments, Context& context,
                  const std::string& label);

// fp64 by mma, whatever the strides; kDoubleStages or one less.
DeviceCode double_code(int stages);
uint64_t double_source_hash();
void double_launch(int64_t batch, TileArguments& arguments, Context& context, const std::string& label);

// Products of groups (tile/grouped.cuh): by mma, or by FMA of whatever types and strides.
DeviceCode grouped_mma_code(const MmaVariant& variant);
DeviceCode grouped_tile_code(DType dtype);
uint64_t grouped_source_hash();
void grouped_mma_launch(const MmaVariant& variant, GroupedTileArguments& arguments, Context& context,
                        const std::string& label);
void grouped_tile_launch(DType dtype, GroupedTileArguments& arguments, Context& context, const std::string& label);

}  // namespace kernel_pytorch::product
