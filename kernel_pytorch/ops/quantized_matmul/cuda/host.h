// What the host sides of the CUDA kernels share: which problems they take, their arguments and their names.
#pragma once

#include <string>

#include "kernel_pytorch/ops/quantized_matmul/cuda/arguments_cuda.h"
#include "kernel_pytorch/ops/quantized_matmul/operation.h"

namespace kernel_pytorch::quantized_matmul {

// Null, or why none of them takes the problem.
const char* cuda_weight_obstacle(const Product& problem, const DeviceInfo& device);
// The same of kernels with stages of the weight in shared memory, besides.
const char* window_obstacle(const Product& problem);
Arguments cuda_arguments(const Product& problem);
std::string cuda_format_name(Format format);
// For kernels whose stages bring so many columns.
void set_pieces(const Product& problem, int64_t stage_columns, WeightArguments* weight);
// Tiles of so many steps each, divided among at most so many blocks.
WalkArguments walk_of(int64_t tiles, int64_t steps, int64_t most_blocks);
// As the copy engine takes them.
TensorView codes_view(const Product& problem);

inline constexpr Format kFastFormats[] = {Format::kNvfp4, Format::kMxfp4, Format::kInt4, Format::kInt8};
inline constexpr int kVariants = 2 * group_format::kFormats;
// By format and type.
inline int variant_of(const Product& problem) {
  return static_cast<int>(problem.format) * 2 + (problem.x.dtype == DType::kFloat16);
}

}  // namespace kernel_pytorch::quantized_matmul
