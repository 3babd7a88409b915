// Host side of products of wide types on tensor cores: fp32 by tf32's mma (full: three products of split operands,
// tf32: one), and fp64 by its own.
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

constexpr const char* kNeedsFloat = "takes fp32";
constexpr const char* kFloatAmd = "cuda_tile is faster on AMD's GPUs";
constexpr const char* kNeedsDouble = "takes fp64";
constexpr const char* kFloatPrecision = "computes the precisions full and tf32";
constexpr const char* kFloatMisaligned = "rows of a or b do not begin at multiples of 16 bytes";
constexpr const char* kFloatNothing = "there is nothing to multiply";
constexpr const char* kWideTooLarge = "a size is 2^30 or more, or there are more rows than blocks of them are launched";
constexpr int64_t kMostBlocks = 65535;  // of rows

struct FloatConfig {
  int edge = 128;  // of a block's tile, 128 or 64
};
constexpr bool is_legal(const FloatConfig& config) {
  return config.edge == 64 || config.edge == 128;
}
constexpr auto kFloatConfigFields = config_fields<FloatConfig>(config_field<&FloatConfig::edge>());
constexpr ConfigFields fields_of(const FloatConfig&) {
  return kFloatConfigFields;
}
constexpr FloatConfig kFloatConfigs[] = {{.edge = 64}, {.edge = 128}};
static_assert(are_legal(kFloatConfigs));

const char* size_obstacle(const Product& problem, int64_t rows_of_block) {
  const Sizes sizes = sizes_of(problem);
  const bool is_large = sizes.m > kMostBlocks * rows_of_block || std::max(sizes.n, sizes.k) >= int64_t{1} << 30;
  return is_large ? kWideTooLarge : nullptr;
}

// On AMD's GPUs mma is made of exchanges between lanes, many more instructions than cuda_tile's FMA.
registry::Support supports_float(const Product& problem, const DeviceInfo& device) {
  if (const char* obstacle = cuda_obstacle(device)) return registry::Support::no(obstacle);
  if (device.is_amd()) return registry::Support::no(kFloatAmd);
  if (problem.a.dtype != DType::kFloat32) return registry::Support::no(kNeedsFloat);
  if (problem.up.is_present()) return registry::Support::no(kOneMatrix);
  if (problem.precision != Precision::kFull && problem.precision != Precision::kTf32) {
    return registry::Support::no(kFloatPrecision);
  }
  if (!has_aligned_lines(problem.a) || !has_aligned_lines(problem.b)) return registry::Support::no(kFloatMisaligned);
  const Sizes sizes = sizes_of(problem);
  if (sizes.batch == 0 || sizes.m == 0 || sizes.n == 0 || sizes.k == 0) return registry::Support::no(kFloatNothing);
  return registry::Support::unless(size_obstacle(problem, 64));  // the smaller tile
}

std::vector<std::string> float_configs(const Product&, const DeviceInfo&) {
  return config_texts(kFloatConfigs);
}

// Small tiles where large ones would leave multiprocessors idle.
int float_heuristic(const Product& problem, const DeviceInfo& device) {
  const Sizes sizes = sizes_of(problem);
  const int64_t blocks = divide_up(sizes.m, 128) * divide_up(sizes.n, 128) * sizes.batch;
  return blocks >= device.cuda.multiprocessors ? 1 : 0;
}

void run_float(const Product& problem, int config, Context& context) {
  static const std::string kLabel = "matmul fp32 mma";
  product::TileArguments arguments = tile_arguments(problem);
  product::float_launch({.edge = kFloatConfigs[config].edge,
                         .across_a = !is_row_major(problem.a),
                         .across_b = is_row_major(problem.b),
                         .once = problem.precision == Precision::kTf32},
                        problem.a.sizes[0], arguments, context, kLabel);
}

std::vector<DeviceCode> float_device_code() {
  std::vector<DeviceCode> codes;
  for (const bool across_a : {false, true}) {
    for (const bool across_b : {false, true}) {
      for (const bool once : {false, true}) {
        for (const FloatConfig& config : kFloatConfigs) {
          codes.push_back(product::float_code({config.edge, across_a, across_b, once}));
        }
      }
    }
  }
  return codes;
}

// The only kernel of fp64 on a GPU.
registry::Support supports_double(const Product& problem, const DeviceInfo& device) {
  if (const char* obstacle = cuda_obstacle(device)) return registry::Support::no(obstacle);
  if (problem.a.dtype != DType::kFloat64) return registry::Support::no(kNeedsDouble);
  if (problem.up.is_present()) return registry::Support::no(kOneMatrix);
  return registry::Support::unless(size_obstacle(problem, product::kDoubleRows));
}

void run_double(const Product& problem, int, Context& context) {
  static const std::string kLabel = "matmul fp64 mma";
  const Sizes sizes = sizes_of(problem);
  if (sizes.m == 0 || sizes.batch == 0) return;
  product::TileArguments arguments = tile_arguments(problem);
  product::double_launch(sizes.batch, arguments, context, kLabel);
}

std::vector<DeviceCode> double_device_code() {
  return {product::double_code(product::kDoubleStages), product::double_code(product::kDoubleStages - 1)};
}

}  // namespace

constinit const registry::Kernel<Product> kMmaFloat{.name = "cuda_mma_fp32",
                                                    .origin = registry::Origin::kOurs,
                                                    .supports = supports_float,
                                                    .configs = float_configs,
                                                    .heuristic = float_heuristic,
                                                    .run = run_float,
                                                    .source_hash = product::float_source_hash,
                                                    .device_code = float_device_code,
                                                    .is_fallback = true};  // cuBLAS' fp32 is as fast or faster

constinit const registry::Kernel<Product> kMmaDouble{.name = "cuda_mma_fp64",
                                                     .origin = registry::Origin::kOurs,
                                                     .supports = supports_double,
                                                     .configs = nullptr,
                                                     .heuristic = nullptr,
                                                     .run = run_double,
                                                     .source_hash = product::double_source_hash,
                                                     .device_code = double_device_code,
                                                     .is_fallback = true};

}  // namespace kernel_pytorch::matmul
