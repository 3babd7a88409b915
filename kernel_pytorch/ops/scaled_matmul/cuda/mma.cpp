// Host side of the FP8 product by mma, which every GPU with FP8 has (8.9 and newer): all scales, any bias and output.
#include <algorithm>
#include <string>
#include <vector>

#include "kernel_pytorch/base/rows.h"
#include "kernel_pytorch/ops/engines/gemm/tile/host.h"
#include "kernel_pytorch/ops/scaled_matmul/cuda/tile_arguments.h"
#include "kernel_pytorch/ops/support/cuda_support.h"

namespace kernel_pytorch::scaled_matmul {
namespace {

constexpr const char* kNothing = "there is nothing to compute";
constexpr const char* kMisaligned = "rows of a or b do not begin at multiples of 16 bytes";
constexpr const char* kAmd = "is written in NVIDIA's mma of FP8, which AMD's GPUs have no form of";
constexpr const char* kTooLarge = "a size is 2^30 or more, or there are more than eight million rows";

registry::Support supports(const Product& problem, const DeviceInfo& device) {
  if (const char* obstacle = float8_obstacle(device)) return registry::Support::no(obstacle);
  if (device.is_amd()) return registry::Support::no(kAmd);
  const int64_t m = problem.a.sizes[0], n = problem.b.sizes[0], k = problem.a.sizes[1];
  if (std::min({m, n, k}) == 0) return registry::Support::no(kNothing);
  if (!has_aligned_rows(problem.a) || !has_aligned_rows(problem.b)) return registry::Support::no(kMisaligned);
  const bool is_large = m > int64_t{65535} * product::kMmaEdge || std::max(n, k) >= int64_t{1} << 30;
  return registry::Support::unless(is_large ? kTooLarge : nullptr);
}

void run(const Product& problem, int, Context& context) {
  static const std::string kLabel = "scaled_matmul mma";
  product::TileArguments arguments = tile_arguments(problem);
  const product::Float8Variant variant = {
      .a = problem.a.dtype, .b = problem.b.dtype, .promotes = problem.accurate || is_blocked(problem)};
  product::float8_launch(variant, arguments, context, kLabel);
}

std::vector<DeviceCode> device_code() {
  std::vector<DeviceCode> codes;
  for (const DType a : {DType::kFloat8E4M3, DType::kFloat8E5M2}) {
    for (const bool promotes : {false, true}) {
      codes.push_back(product::float8_code({.a = a, .b = DType::kFloat8E4M3, .promotes = promotes}));
    }
  }
  return codes;
}

}  // namespace

constinit const registry::Kernel<Product> kCudaMma{.name = "cuda_mma",
                                                   .origin = registry::Origin::kOurs,
                                                   .supports = supports,
                                                   .configs = nullptr,
                                                   .heuristic = nullptr,
                                                   .run = run,
                                                   .source_hash = product::float8_source_hash,
                                                   .device_code = device_code};

}  // namespace kernel_pytorch::scaled_matmul
