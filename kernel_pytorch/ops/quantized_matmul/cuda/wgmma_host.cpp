// Host side of the product of more rows with a weight in few bits on Hopper: x is arranged into scratch memory by a
// launch of its own, and blocks divide the steps of all tiles evenly.
#include <algorithm>
#include <string>
#include <vector>

#include "kernel_pytorch/base/config_fields.h"
#include "kernel_pytorch/base/error.h"
#include "kernel_pytorch/device/cuda/driver.h"
#include "kernel_pytorch/device/cuda/tensor_map.h"
#include "kernel_pytorch/jit/jit.h"
#include "kernel_pytorch/ops/quantized_matmul/cuda/host.h"
#include "kernel_pytorch/ops/support/cuda_support.h"

namespace kernel_pytorch::quantized_matmul {

constexpr auto kWgmmaConfigFields = config_fields<WgmmaConfig>(
    config_field<&WgmmaConfig::rows>(), config_field<&WgmmaConfig::groups>(), config_field<&WgmmaConfig::stages>(),
    config_field<&WgmmaConfig::spans>(), config_field<&WgmmaConfig::sets>());
constexpr ConfigFields fields_of(const WgmmaConfig&) {
  return kWgmmaConfigFields;
}

namespace {

constexpr const char* kSource = "kernel_pytorch/ops/quantized_matmul/cuda/wgmma.cuh";
constexpr const char* kSomeRows = "takes 3 to 192 rows; of more, decoding the weight once costs less";
constexpr int64_t kFewestRows = 2, kMostRows = 192;

constexpr WgmmaConfig kConfigs[] = {
    {.rows = 16, .groups = 4, .stages = 4, .spans = 2},
    {.rows = 32, .groups = 4, .stages = 3, .spans = 2},
    {.rows = 64, .groups = 4, .stages = 3, .spans = 2},
    {.rows = 96, .groups = 3, .stages = 4, .spans = 1},
    {.rows = 128, .groups = 3, .stages = 3, .spans = 1},
    {.rows = 16, .groups = 4, .stages = 4, .spans = 2, .sets = 2},
    {.rows = 32, .groups = 4, .stages = 3, .spans = 2, .sets = 2},
    {.rows = 64, .groups = 3, .stages = 3, .spans = 2, .sets = 2},
};
constexpr int kMostRowsConfig = 4;
static_assert(are_legal(kConfigs));
constexpr int kConfigCount = static_cast<int>(std::size(kConfigs));

registry::Support supports(const Product& problem, const DeviceInfo& device) {
  if (const char* obstacle = cuda_weight_obstacle(problem, device)) return registry::Support::no(obstacle);
  if (const char* missing = feature_obstacle(device, CudaFeature::kWgmma)) return registry::Support::no(missing);
  if (const char* obstacle = window_obstacle(problem)) return registry::Support::no(obstacle);
  const int64_t m = problem.x.sizes[0];
  return registry::Support::unless(m <= kFewestRows || m > kMostRows || problem.x.sizes[1] == 0 ? kSomeRows : nullptr);
}

std::vector<std::string> configs(const Product&, const DeviceInfo&) {
  return config_texts(kConfigs);
}
// The least rows of tiles, the largest tiles of those, the first of equal ones.
int heuristic(const Product& problem, const DeviceInfo&) {
  const int64_t m = problem.x.sizes[0];
  const auto rows_of = [&](const WgmmaConfig& config) { return divide_up(m, config.rows) * config.rows; };
  int best = kMostRowsConfig;
  for (int i = kConfigCount - 1; i >= 0; --i) {
    const bool has_smaller = kConfigs[i].rows < kConfigs[best].rows && rows_of(kConfigs[i]) == rows_of(kConfigs[best]);
    const bool has_few_tiles = divide_up(m, kConfigs[i].rows) <= divide_up(m, 128);
    if (has_few_tiles && !has_smaller && rows_of(kConfigs[i]) <= rows_of(kConfigs[best])) best = i;
  }
  return best;
}

DeviceCode code_of(DType dtype, Format format, int config) {
  return {.source = kSource,
          .entry = concat("kernel_pytorch::quantized_matmul::wgmma_product<", element_type_name(dtype), ", ",
                          cuda_format_name(format), ", ", device_text(kConfigs[config]), ">"),
          .minimum_capability = 90,
          .architecture_specific = true};
}
DeviceCode arrange_code(DType dtype, Format format) {
  return {.source = kSource,
          .entry = concat("kernel_pytorch::quantized_matmul::arrange<", element_type_name(dtype), ", ",
                          cuda_format_name(format), ">"),
          .minimum_capability = 90,
          .architecture_specific = true};
}

TensorView arranged_x(const Product& problem, Context& context) {
  static const std::string kLabel = "quantized_matmul arrange";
  static KernelTable<kVariants> kernels;
  const int64_t m = problem.x.sizes[0], k = problem.x.sizes[1], span = span_of(problem.format);
  TensorView view = contiguous_view(nullptr, problem.x.dtype, {1, m, divide_up(k, span) * span}, problem.x.device);
  view.data = context.scratch->allocate(static_cast<size_t>(view.byte_count()));
  CUkern_st* kernel =
      kernels.get(variant_of(problem), context, [&] { return arrange_code(problem.x.dtype, problem.format); });
  ArrangeArguments arguments{.x = problem.x.data,
                             .output = view.data,
                             .x_stride = problem.x.strides[0],
                             .output_stride = view.sizes[2],
                             .rows = static_cast<int32_t>(m),
                             .k = static_cast<int32_t>(k),
                             .units = static_cast<int32_t>(view.sizes[2] / 8)};
  cuda_device::LaunchShape shape;
  shape.grid_x = static_cast<unsigned>(divide_up(arguments.units, 256));
  shape.grid_y = static_cast<unsigned>(m);
  shape.block_x = 256;
  shape.programmatic_dependent = true;
  void* pointers[] = {&arguments};
  cuda_device::launch(context, kernel, shape, pointers, kLabel);
  return view;
}

void run(const Product& problem, int config, Context& context) {
  static const std::string kLabel = "quantized_matmul wgmma";
  static KernelTable<kVariants * kConfigCount> kernels;
  const int64_t m = problem.x.sizes[0], k = problem.x.sizes[1], n = problem.codes.sizes[0];
  if (n == 0) return;
  const int rows = kConfigs[config].rows, groups = kConfigs[config].groups,
            entry = variant_of(problem) * kConfigCount + config;
  CUkern_st* kernel = kernels.get(entry, context, [&] { return code_of(problem.x.dtype, problem.format, config); });
  WgmmaArguments arguments{};
  arguments.product = cuda_arguments(problem);
  const int64_t row_tiles = divide_up(m, rows), tiles = divide_up(n, groups * 64) * row_tiles,
                depth = kConfigs[config].spans * span_of(problem.format), steps = divide_up(k, depth);
  arguments.walk = walk_of(tiles, steps, std::max(context.info->cuda.multiprocessors, 1));
  arguments.row_tiles = static_cast<int32_t>(row_tiles);
  set_pieces(problem, depth, &arguments.product.weight);
  const int64_t blocks = divide_up(tiles * steps, arguments.walk.steps_each);
  if (arguments.walk.steps_each % steps != 0) {
    const int64_t sums = tiles * arguments.walk.most * groups * 64 * rows;
    const size_t counters = static_cast<size_t>(tiles * groups) * sizeof(uint32_t);
    arguments.sums = static_cast<float*>(context.scratch->allocate(static_cast<size_t>(sums) * sizeof(float)));
    arguments.counters = static_cast<uint32_t*>(context.scratch->allocate(counters));
    cuda_device::fill_bytes(context.info->device.index, arguments.counters, 0, counters, context.stream);
  }
  const TensorView x = arranged_x(problem, context);
  cuda_device::encode_tensor_map(x, rows, arguments.x.words);
  cuda_device::encode_tensor_map(codes_view(problem), groups * 64, arguments.codes.words, 1, kSpanBytes);
  cuda_device::LaunchShape shape;
  shape.grid_x = static_cast<unsigned>(blocks);
  shape.block_x = static_cast<unsigned>(wgmma_threads(kConfigs[config]));
  shape.shared_bytes = static_cast<unsigned>(wgmma_shared_bytes(problem.format, kConfigs[config]));
  shape.programmatic_dependent = true;
  void* pointers[] = {&arguments};
  cuda_device::launch(context, kernel, shape, pointers, kLabel);
}

std::vector<DeviceCode> device_code() {
  std::vector<DeviceCode> codes;
  for (int config = 0; config < kConfigCount; ++config) {
    codes.push_back(code_of(DType::kBFloat16, Format::kNvfp4, config));
    codes.push_back(code_of(DType::kBFloat16, Format::kInt4, config));
  }
  codes.push_back(code_of(DType::kBFloat16, Format::kMxfp4, 2));
  codes.push_back(code_of(DType::kBFloat16, Format::kInt8, kConfigCount - 1));
  codes.push_back(code_of(DType::kFloat16, Format::kNvfp4, 2));
  codes.push_back(arrange_code(DType::kBFloat16, Format::kNvfp4));
  return codes;
}
uint64_t source_hash() {
  return jit::source_hash(kSource);
}

}  // namespace

constinit const registry::Kernel<Product> kCudaWgmma{.name = "cuda_wgmma",
                                                     .supports = supports,
                                                     .configs = configs,
                                                     .heuristic = heuristic,
                                                     .run = run,
                                                     .source_hash = source_hash,
                                                     .device_code = device_code};

}  // namespace kernel_pytorch::quantized_matmul
