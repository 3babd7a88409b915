// Host side of the plain FP8 product on CUDA: codes are decoded to fp32, in which their products are exact. Takes what
// the tensor cores' kernels do not: any strides, and k = 0.
#include <algorithm>
#include <string>
#include <vector>

#include "kernel_pytorch/ops/engines/gemm/tile/host.h"
#include "kernel_pytorch/ops/scaled_matmul/cuda/tile_arguments.h"
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

void run_tile(const Product& problem, int, Context& context) {
  static const std::string kLabel = "scaled_matmul tile";
  if (problem.a.sizes[0] == 0 || problem.b.sizes[0] == 0) return;
  product::TileArguments arguments = tile_arguments(problem);
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
