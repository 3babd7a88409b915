// Host side of the plain FP8 product on CUDA: codes are decoded to fp32, in which their products are exact. Takes what
// the tensor cores' kernel does not: any strides, any bias.
#include <algorithm>
#include <string>
#include <vector>

#include "kernel_pytorch/ops/engines/gemm/tile/host.h"
#include "kernel_pytorch/ops/scaled_matmul/operation.h"
#include "kernel_pytorch/ops/support/cuda_support.h"

namespace kernel_pytorch::scaled_matmul {
namespace {

constexpr const char* kTooLarge = "a size is 2^30 or more, or there are more than four million rows";
constexpr int kPerThread = 4;

registry::Support supports_tile(const Product& problem, const DeviceInfo& device) {
  if (const char* obstacle = float8_obstacle(device)) return registry::Support::no(obstacle);
  const bool is_large =
      problem.a.sizes[0] > int64_t{65535} * 64 || std::max(problem.b.sizes[0], problem.a.sizes[1]) >= int64_t{1} << 30;
  return is_large ? registry::Support::no(kTooLarge) : registry::Support::yes();
}

product::TileScale tile_scale(const TensorView& scale, int64_t rows) {
  const ScaleLayout layout(scale, rows);
  return {.data = layout.data,
          .row = layout.row_stride,
          .block = layout.block_stride,
          .rows_each = static_cast<int32_t>(layout.rows_each)};
}

void run_tile(const Product& problem, int, Context& context) {
  static const std::string kLabel = "scaled_matmul tile";
  const int64_t m = problem.a.sizes[0], n = problem.b.sizes[0];
  if (m == 0 || n == 0) return;
  product::TileArguments arguments{};
  arguments.a = {.data = problem.a.data, .batch = 0, .outer = problem.a.strides[0], .inner = 1};
  arguments.b = {.data = problem.b.data, .batch = 0, .outer = problem.b.strides[0], .inner = 1};
  arguments.scale_a = tile_scale(problem.scale_a, m);
  arguments.scale_b = tile_scale(problem.scale_b, n);
  arguments.m = static_cast<int32_t>(m);
  arguments.n = static_cast<int32_t>(n);
  arguments.k = static_cast<int32_t>(problem.a.sizes[1]);
  arguments.alpha = 1;
  arguments.kind = pointwise::Kind::kIdentity;
  arguments.bias = product::tile_matrix(problem.bias);
  arguments.output = product::tile_matrix(problem.output);
  arguments.output_scale = problem.output_scale.is_present() ? problem.output_scale.as<const float>() : nullptr;
  arguments.amax = problem.amax.is_present() ? problem.amax.as<float>() : nullptr;
  product::tile_launch({problem.a.dtype, problem.b.dtype, kPerThread, is_blocked(problem)}, 1, arguments, context,
                       kLabel);
}

std::vector<DeviceCode> tile_device_code() {
  std::vector<DeviceCode> codes;
  for (const DType a : {DType::kFloat8E4M3, DType::kFloat8E5M2}) {
    for (const bool blocked : {false, true}) {
      codes.push_back(product::tile_code({a, DType::kFloat8E4M3, kPerThread, blocked}));
    }
  }
  return codes;
}

}  // namespace

constinit const registry::Kernel<Product> kTile{.name = "cuda_tile",
                                                .origin = registry::Origin::kOurs,
                                                .supports = supports_tile,
                                                .configs = nullptr,
                                                .heuristic = nullptr,
                                                .run = run_tile,
                                                .source_hash = product::tile_source_hash,
                                                .device_code = tile_device_code,
                                                .is_fallback = true};

}  // namespace kernel_pytorch::scaled_matmul
