// Host side of grouped products with weights in few bits on CUDA.
#include <algorithm>
#include <string>
#include <vector>

#include "kernel_pytorch/base/error.h"
#include "kernel_pytorch/device/cuda/driver.h"
#include "kernel_pytorch/jit/jit.h"
#include "kernel_pytorch/ops/engines/gemm/tile/host.h"
#include "kernel_pytorch/ops/grouped_matmul/grouped_matmul.h"
#include "kernel_pytorch/ops/quantized_grouped_matmul/cuda/arguments_cuda.h"
#include "kernel_pytorch/ops/quantized_grouped_matmul/operation.h"
#include "kernel_pytorch/ops/support/cuda_support.h"
#include "kernel_pytorch/ops/support/group_format/check.h"

namespace kernel_pytorch::quantized_grouped_matmul {
namespace {

constexpr const char* kSource = "kernel_pytorch/ops/quantized_grouped_matmul/cuda/kernel.cuh";
constexpr const char* kNeeds16Bit = "takes bf16 and fp16";
constexpr const char* kTooLarge = "a size is 2^30 or more, or there are more than four million rows";

registry::Support supports(const Product& problem, const DeviceInfo& device) {
  if (const char* obstacle = cuda_obstacle(problem.x.dtype, device)) return registry::Support::no(obstacle);
  if (size_of(problem.x.dtype) != 2) return registry::Support::no(kNeeds16Bit);
  const int64_t rows = problem.output.sizes[0];
  const bool is_large = rows > int64_t{65535 - grouped_matmul::kMostGroups - 1} * kEdge ||
                        std::max(problem.x.sizes[1], problem.codes.sizes[0]) >= int64_t{1} << 30;
  return registry::Support::unless(is_large ? kTooLarge : nullptr);
}

DeviceCode code_of(DType dtype, Format format, bool is_aligned) {
  return {.source = kSource,
          .entry = concat("kernel_pytorch::quantized_grouped_matmul::grouped_product<", element_type_name(dtype),
                          ", kernel_pytorch::group_format::Format(", static_cast<int>(format), "), ",
                          is_aligned ? "true" : "false", ">"),
          .minimum_capability = 80,
          .architecture_specific = false};
}

void run(const Product& problem, int, Context& context) {
  static const std::string kLabel = "quantized_grouped_matmul";
  static KernelTable<2 * group_format::kFormats * 2> kernels;
  if (problem.output.element_count() == 0) return;
  const int64_t rows = problem.output.sizes[0], n = columns_of(problem), k = problem.x.sizes[1];
  const bool is_aligned = k % 8 == 0 && vector_access_obstacle(problem.x) == nullptr;
  const int entry =
      ((problem.x.dtype == DType::kFloat16) * group_format::kFormats + static_cast<int>(problem.format)) * 2 +
      is_aligned;
  CUkern_st* kernel = kernels.get(entry, context, [&] { return code_of(problem.x.dtype, problem.format, is_aligned); });
  Arguments arguments{};
  product::TileArguments& tile = arguments.grouped.product;
  tile.a = {.data = problem.x.data, .batch = 0, .outer = problem.x.strides[0], .inner = 1, .pair = 0};
  tile.m = static_cast<int32_t>(rows);
  tile.n = static_cast<int32_t>(n);
  tile.k = static_cast<int32_t>(k);
  tile.alpha = tile.beta = 1;
  tile.kind = problem.activation;
  tile.bias = product::tile_matrix(problem.bias);
  tile.output = product::tile_matrix(problem.output);
  arguments.grouped.offsets = problem.offsets.as<const int32_t>();
  arguments.grouped.gather_a = problem.gather.as<const int32_t>();
  arguments.grouped.groups = static_cast<int32_t>(groups_of(problem));
  arguments.grouped.bias_stride = n;
  arguments.codes = problem.codes.as<const uint8_t>();
  arguments.code_stride = problem.codes.sizes[1];
  arguments.scales = problem.scales.data;
  arguments.scale_type = group_format::scale_type_of(problem.scales.dtype);
  arguments.zeros = problem.zeros.as<const uint8_t>();
  arguments.tensor_scale = problem.tensor_scale.as<const float>();
  arguments.group = static_cast<int32_t>(problem.group);
  arguments.scales_of_row = static_cast<int32_t>(problem.scales.sizes[1]);
  cuda_device::LaunchShape shape;
  shape.grid_x = static_cast<unsigned>(divide_up(n, kEdge));
  shape.grid_y = static_cast<unsigned>(divide_up(rows, kEdge) + groups_of(problem) + 1);  // rows in no group besides
  shape.block_x = product::kTileThreads;
  void* pointers[] = {&arguments};
  cuda_device::launch(context, kernel, shape, pointers, kLabel);
}

std::vector<DeviceCode> device_code() {
  std::vector<DeviceCode> codes;
  for (int format = 0; format < group_format::kFormats; ++format) {
    codes.push_back(code_of(DType::kBFloat16, static_cast<Format>(format), true));
  }
  codes.push_back(code_of(DType::kFloat16, Format::kInt3, false));
  return codes;
}
uint64_t source_hash() {
  return jit::source_hash(kSource);
}

}  // namespace

constinit const registry::Kernel<Product> kCudaMma{
    .name = "cuda_mma", .supports = supports, .run = run, .source_hash = source_hash, .device_code = device_code};

}  // namespace kernel_pytorch::quantized_grouped_matmul
