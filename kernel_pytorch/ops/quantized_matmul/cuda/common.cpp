// What the host sides of the CUDA kernels share.
#include "kernel_pytorch/ops/quantized_matmul/cuda/host.h"

#include <algorithm>

#include "kernel_pytorch/base/error.h"
#include "kernel_pytorch/ops/engines/gemm/tile/host.h"
#include "kernel_pytorch/ops/support/cuda_support.h"

namespace kernel_pytorch::quantized_matmul {
namespace {

constexpr const char* kNeeds16Bit = "takes bf16 and fp16";
constexpr const char* kNoMxfp8 = "does not take mxfp8";
constexpr const char* kDepth = "needs rows of codes and of x that begin at multiples of 16 bytes";
constexpr const char* kLarge = "n or k is 2^30 or more";

}  // namespace

const char* cuda_weight_obstacle(const Product& problem, const DeviceInfo& device) {
  if (const char* obstacle = cuda_obstacle(problem.x.dtype, device)) return obstacle;
  if (size_of(problem.x.dtype) != 2) return kNeeds16Bit;
  if (problem.format == Format::kMxfp8) return kNoMxfp8;
  const int64_t k = problem.x.sizes[1];
  const bool is_aligned = k % (16 * group_format::codes_in_byte(problem.format)) == 0 &&
                          reinterpret_cast<uintptr_t>(problem.codes.data) % 16 == 0 &&
                          reinterpret_cast<uintptr_t>(problem.scales.data) % 2 == 0 &&
                          vector_access_obstacle(problem.x) == nullptr;
  if (!is_aligned) return kDepth;
  return std::max(k, problem.codes.sizes[0]) >= int64_t{1} << 30 ? kLarge : nullptr;
}

std::string cuda_format_name(Format format) {
  return concat("kernel_pytorch::group_format::Format(", static_cast<int>(format), ")");
}

Arguments cuda_arguments(const Product& problem) {
  Arguments arguments{};
  arguments.tile.a = {.data = problem.x.data, .batch = 0, .outer = problem.x.strides[0], .inner = 1, .pair = 0};
  arguments.tile.m = static_cast<int32_t>(problem.x.sizes[0]);
  arguments.tile.n = static_cast<int32_t>(problem.codes.sizes[0]);
  arguments.tile.k = static_cast<int32_t>(problem.x.sizes[1]);
  arguments.tile.alpha = 1;
  arguments.tile.kind = problem.activation;
  arguments.tile.bias = product::tile_matrix(problem.bias);
  arguments.tile.output = product::tile_matrix(problem.output);
  arguments.weight = {.codes = problem.codes.as<const uint8_t>(),
                      .code_stride = problem.codes.sizes[1],
                      .scales = problem.scales.data,
                      .zeros = problem.zeros.as<const uint8_t>(),
                      .tensor_scale = problem.tensor_scale.as<const float>(),
                      .group = static_cast<int32_t>(problem.group),
                      .groups = static_cast<int32_t>(problem.scales.sizes[1])};
  return arguments;
}

}  // namespace kernel_pytorch::quantized_matmul
