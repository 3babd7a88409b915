// Host side of the plain product on CUDA: every type, stride, form and precision that the op knows, by fp32 FMA.
#include <algorithm>
#include <string>
#include <vector>

#include "kernel_pytorch/base/config_fields.h"
#include "kernel_pytorch/ops/engines/gemm/tile/host.h"
#include "kernel_pytorch/ops/matmul/cuda/tile.h"
#include "kernel_pytorch/ops/matmul/operation.h"
#include "kernel_pytorch/ops/support/cuda_support.h"

namespace kernel_pytorch::matmul {
namespace {

constexpr const char* kTooLarge = "a size is 2^30 or more, or there are more than four million rows";
constexpr int64_t kMaximumRows = int64_t{65535} * 64;
struct TileConfig {
  int per_thread = 8;  // sums of a thread along each side: 8 make tiles of 128x128, 4 of 64x64
};
constexpr bool is_legal(const TileConfig& config) {
  return config.per_thread == 4 || config.per_thread == 8;
}
constexpr auto kTileConfigFields = config_fields<TileConfig>(config_field<&TileConfig::per_thread>());
constexpr ConfigFields fields_of(const TileConfig&) {
  return kTileConfigFields;
}
constexpr TileConfig kConfigs[] = {{.per_thread = 8}, {.per_thread = 4}};
static_assert(are_legal(kConfigs));

registry::Support supports_tile(const Product& problem, const DeviceInfo& device) {
  if (const char* obstacle = cuda_obstacle(problem.a.dtype, device)) return registry::Support::no(obstacle);
  if (problem.up.is_present()) return registry::Support::no(kOneMatrix);
  const Sizes sizes = sizes_of(problem);
  const bool is_large = sizes.m > kMaximumRows || std::max(sizes.n, sizes.k) >= int64_t{1} << 30;
  return is_large ? registry::Support::no(kTooLarge) : registry::Support::yes();
}

std::vector<std::string> tile_configs(const Product&, const DeviceInfo&) {
  return config_texts(kConfigs);
}

// Small tiles where large ones would leave multiprocessors idle.
int tile_heuristic(const Product& problem, const DeviceInfo& device) {
  const Sizes sizes = sizes_of(problem);
  const int64_t tiles = divide_up(sizes.m, 128) * divide_up(sizes.n, 128) * sizes.batch;
  return tiles < 2 * device.cuda.multiprocessors ? 1 : 0;
}

product::TileOperand operand_of(const TensorView& view, bool transposed) {
  return {.data = view.data,
          .batch = view.strides[0],
          .outer = view.strides[transposed ? 2 : 1],
          .inner = view.strides[transposed ? 1 : 2],
          .pair = 0};
}

void run_tile(const Product& problem, int config, Context& context) {
  static const std::string kLabel = "matmul tile";
  const Sizes sizes = sizes_of(problem);
  if (sizes.m == 0 || sizes.batch == 0) return;
  product::TileArguments arguments = tile_arguments(problem);
  product::tile_launch({problem.a.dtype, problem.a.dtype, kConfigs[config].per_thread, false}, sizes.batch, arguments,
                       context, kLabel);
}

// Large tiles are for fp32, which has no other kernel.
std::vector<DeviceCode> tile_device_code() {
  std::vector<DeviceCode> codes = {
      product::tile_code({DType::kFloat32, DType::kFloat32, kConfigs[0].per_thread, false})};
  for (const DType dtype : kCudaTypes)
    codes.push_back(product::tile_code({dtype, dtype, kConfigs[1].per_thread, false}));
  return codes;
}

}  // namespace

product::TileArguments tile_arguments(const Product& problem) {
  const Sizes sizes = sizes_of(problem);
  product::TileArguments arguments{};
  arguments.a = operand_of(problem.a, false);
  arguments.b = operand_of(problem.b, true);
  if (problem.up.is_present()) arguments.b.pair = up_distance(problem);
  arguments.m = static_cast<int32_t>(sizes.m);
  arguments.n = static_cast<int32_t>(sizes.n);
  arguments.k = static_cast<int32_t>(sizes.k);
  arguments.alpha = static_cast<float>(problem.alpha);
  arguments.beta = static_cast<float>(problem.beta);
  arguments.wide_alpha = problem.alpha;
  arguments.wide_beta = problem.beta;
  arguments.form = problem.up.is_present() ? product::TileForm::kGated : static_cast<product::TileForm>(problem.form);
  arguments.kind = problem.activation;
  arguments.rounding = static_cast<product::TileRounding>(problem.precision);
  arguments.bias = product::tile_matrix(problem.bias);
  arguments.saved = product::tile_matrix(problem.saved);
  arguments.residual = product::tile_matrix(problem.residual);
  arguments.output = product::tile_matrix(problem.output);
  arguments.preactivation = product::tile_matrix(problem.preactivation);
  arguments.row_sums = product::tile_matrix(problem.row_sums);
  if (problem.row_sums.is_present()) arguments.row_sums.batch = problem.row_sums.strides[0];
  return arguments;
}

constinit const registry::Kernel<Product> kTile{.name = "cuda_tile",
                                                .origin = registry::Origin::kOurs,
                                                .supports = supports_tile,
                                                .configs = tile_configs,
                                                .heuristic = tile_heuristic,
                                                .run = run_tile,
                                                .source_hash = product::tile_source_hash,
                                                .device_code = tile_device_code,
                                                .is_fallback = true};

}  // namespace kernel_pytorch::matmul
