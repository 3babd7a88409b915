// Host side of the product of 16-bit matrices by mma.m16n8k16: tensor cores of every GPU since compute capability 8.0.
// The sums over a's rows are a launch of their own.
#include <algorithm>
#include <string>
#include <vector>

#include "kernel_pytorch/ops/matmul/cuda/row_sums.h"
#include "kernel_pytorch/ops/matmul/cuda/tile.h"
#include "kernel_pytorch/ops/matmul/operation.h"
#include "kernel_pytorch/ops/support/cuda_support.h"

namespace kernel_pytorch::matmul {
namespace {

constexpr const char* kMmaNeeds16Bit = "takes bf16 and fp16";
constexpr const char* kMmaMisaligned = "rows of a or b do not begin at multiples of 16 bytes";
constexpr const char* kMmaNothing = "there is nothing to multiply";
constexpr const char* kMmaTooLarge = "a size is 2^30 or more, or there are more than eight million rows";
constexpr int64_t kMmaMaximumRows = int64_t{65535} * product::kMmaEdge;

registry::Support supports_mma(const Product& problem, const DeviceInfo& device) {
  if (const char* obstacle = cuda_obstacle(problem.a.dtype, device)) return registry::Support::no(obstacle);
  if (problem.up.is_present()) return registry::Support::no(kOneMatrix);
  if (size_of(problem.a.dtype) != 2) return registry::Support::no(kMmaNeeds16Bit);
  if (!has_aligned_lines(problem.a) || !has_aligned_lines(problem.b)) return registry::Support::no(kMmaMisaligned);
  const Sizes sizes = sizes_of(problem);
  if (sizes.batch == 0 || sizes.m == 0 || sizes.n == 0 || sizes.k == 0) return registry::Support::no(kMmaNothing);
  const bool is_large = sizes.m > kMmaMaximumRows || std::max(sizes.n, sizes.k) >= int64_t{1} << 30;
  return is_large ? registry::Support::no(kMmaTooLarge) : registry::Support::yes();
}

void run_mma(const Product& problem, int, Context& context) {
  static const std::string kLabel = "matmul mma";
  if (problem.row_sums.is_present()) sum_rows(problem, context);
  product::TileArguments arguments = tile_arguments(problem);
  arguments.row_sums = {};
  product::mma_launch({problem.a.dtype, !is_row_major(problem.a), is_row_major(problem.b)}, problem.a.sizes[0],
                      arguments, context, kLabel);
}

std::vector<DeviceCode> mma_device_code() {
  std::vector<DeviceCode> codes = row_sums_device_code();
  for (const bool across_a : {false, true}) {
    for (const bool across_b : {false, true}) {
      codes.push_back(product::mma_code({DType::kBFloat16, across_a, across_b}));
    }
  }
  return codes;
}

}  // namespace

constinit const registry::Kernel<Product> kMma{.name = "cuda_mma",
                                               .origin = registry::Origin::kOurs,
                                               .supports = supports_mma,
                                               .configs = nullptr,
                                               .heuristic = nullptr,
                                               .run = run_mma,
                                               .source_hash = product::mma_source_hash,
                                               .device_code = mma_device_code,
                                               .is_fallback = true};

}  // namespace kernel_pytorch::matmul
