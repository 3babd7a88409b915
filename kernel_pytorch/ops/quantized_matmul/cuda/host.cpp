// Host side of the products with a weight in few bits on CUDA: for at most 16 rows, and for more.
#include <algorithm>
#include <string>
#include <vector>

#include "kernel_pytorch/base/config_fields.h"
#include "kernel_pytorch/base/error.h"
#include "kernel_pytorch/device/cuda/driver.h"
#include "kernel_pytorch/jit/jit.h"
#include "kernel_pytorch/ops/quantized_matmul/cuda/host.h"
#include "kernel_pytorch/ops/support/cuda_support.h"

namespace kernel_pytorch::quantized_matmul {

constexpr auto kThinConfigFields = config_fields<ThinConfig>(
    config_field<&ThinConfig::columns>(), config_field<&ThinConfig::warps>(), config_field<&ThinConfig::blocks>());
constexpr ConfigFields fields_of(const ThinConfig&) {
  return kThinConfigFields;
}
constexpr auto kMmaConfigFields = config_fields<MmaConfig>(config_field<&MmaConfig::columns>());
constexpr ConfigFields fields_of(const MmaConfig&) {
  return kMmaConfigFields;
}

namespace {

constexpr const char* kThinSource = "kernel_pytorch/ops/quantized_matmul/cuda/thin.cuh";
constexpr const char* kMmaSource = "kernel_pytorch/ops/quantized_matmul/cuda/mma.cuh";
constexpr const char* kFewRows = "takes 1 to 16 rows";
constexpr const char* kSomeRows = "takes 17 to 48 rows; of more, decoding the weight once costs less";
constexpr int64_t kMostMmaRows = 48;

constexpr ThinConfig kThinConfigs[] = {
    {.columns = 16, .warps = 8, .blocks = 4},
    {.columns = 16, .warps = 4, .blocks = 4},
    {.columns = 32, .warps = 8, .blocks = 2},
};
static_assert(are_legal(kThinConfigs));
constexpr int kThinConfigCount = static_cast<int>(std::size(kThinConfigs));
constexpr MmaConfig kMmaConfigs[] = {{.columns = 128}, {.columns = 64}};
static_assert(are_legal(kMmaConfigs));
constexpr int kMmaConfigCount = static_cast<int>(std::size(kMmaConfigs));

registry::Support supports_thin(const Product& problem, const DeviceInfo& device) {
  if (const char* obstacle = cuda_weight_obstacle(problem, device)) return registry::Support::no(obstacle);
  const int64_t m = problem.x.sizes[0];
  return registry::Support::unless(m < 1 || m > kThinRows ? kFewRows : nullptr);
}
registry::Support supports_mma(const Product& problem, const DeviceInfo& device) {
  if (const char* obstacle = cuda_weight_obstacle(problem, device)) return registry::Support::no(obstacle);
  const int64_t m = problem.x.sizes[0];
  return registry::Support::unless(m <= kThinRows || m > kMostMmaRows ? kSomeRows : nullptr);
}

std::vector<std::string> thin_configs(const Product&, const DeviceInfo&) {
  return config_texts(kThinConfigs);
}
std::vector<std::string> mma_configs(const Product&, const DeviceInfo&) {
  return config_texts(kMmaConfigs);
}

// Each block reads all of x: of 4-bit codes 16 columns are as many bytes as four rows. So 32 columns, where there are
// enough of them to fill the device.
int thin_heuristic(const Product& problem, const DeviceInfo& device) {
  const int64_t n = problem.codes.sizes[0];
  const auto fills = [&](int64_t columns) { return divide_up(n, columns) >= 3 * device.cuda.multiprocessors / 2; };
  const int columns = fills(32) ? 32 : 16;
  const auto is_wanted = [&](const ThinConfig& config) { return config.columns == columns; };
  return static_cast<int>(std::ranges::find_if(kThinConfigs, is_wanted) - std::begin(kThinConfigs));
}
int mma_heuristic(const Product& problem, const DeviceInfo& device) {
  const int64_t tiles = divide_up(problem.x.sizes[0], kMmaRows) * divide_up(problem.codes.sizes[0], 128);
  return tiles >= 2 * device.cuda.multiprocessors ? 0 : 1;
}

DeviceCode thin_code(DType dtype, Format format, int config, int row_tiles) {
  return {.source = kThinSource,
          .entry = concat("kernel_pytorch::quantized_matmul::thin_product<", element_type_name(dtype), ", ",
                          cuda_format_name(format), ", ", device_text(kThinConfigs[config]), ", ", row_tiles, ">"),
          .minimum_capability = 80,
          .architecture_specific = false};
}
DeviceCode mma_code(DType dtype, Format format, int config) {
  return {.source = kMmaSource,
          .entry = concat("kernel_pytorch::quantized_matmul::mma_product<", element_type_name(dtype), ", ",
                          cuda_format_name(format), ", ", device_text(kMmaConfigs[config]), ">"),
          .minimum_capability = 80,
          .architecture_specific = false};
}

void run_thin(const Product& problem, int config, Context& context) {
  static const std::string kLabel = "quantized_matmul thin";
  static KernelTable<kVariants * kThinConfigCount * 2> kernels;
  const int64_t n = problem.codes.sizes[0];
  if (n == 0) return;
  const int row_tiles = problem.x.sizes[0] > 8 ? 2 : 1;
  const int entry = (variant_of(problem) * kThinConfigCount + config) * 2 + row_tiles - 1;
  CUkern_st* kernel =
      kernels.get(entry, context, [&] { return thin_code(problem.x.dtype, problem.format, config, row_tiles); });
  Arguments arguments = cuda_arguments(problem);
  cuda_device::LaunchShape shape;
  shape.grid_x = static_cast<unsigned>(divide_up(n, kThinConfigs[config].columns));
  shape.block_x = static_cast<unsigned>(kThinConfigs[config].warps * 32);
  shape.programmatic_dependent = has_feature(*context.info, CudaFeature::kDependentLaunch);
  void* pointers[] = {&arguments};
  cuda_device::launch(context, kernel, shape, pointers, kLabel);
}

void run_mma(const Product& problem, int config, Context& context) {
  static const std::string kLabel = "quantized_matmul mma";
  static KernelTable<kVariants * kMmaConfigCount> kernels;
  const int64_t n = problem.codes.sizes[0];
  if (n == 0) return;
  const int entry = variant_of(problem) * kMmaConfigCount + config;
  CUkern_st* kernel = kernels.get(entry, context, [&] { return mma_code(problem.x.dtype, problem.format, config); });
  Arguments arguments = cuda_arguments(problem);
  const int columns = kMmaConfigs[config].columns;
  cuda_device::LaunchShape shape;
  shape.grid_x = static_cast<unsigned>(divide_up(n, columns));
  shape.grid_y = static_cast<unsigned>(divide_up(problem.x.sizes[0], kMmaRows));
  shape.block_x = kMmaThreads;
  shape.shared_bytes = static_cast<unsigned>(mma_shared_bytes(problem.format, columns));
  void* pointers[] = {&arguments};
  cuda_device::launch(context, kernel, shape, pointers, kLabel);
}

std::vector<DeviceCode> thin_device_code() {
  std::vector<DeviceCode> codes;
  for (const Format format : kFastFormats) codes.push_back(thin_code(DType::kBFloat16, format, 0, 1));
  for (int config = 1; config < kThinConfigCount; ++config) {
    codes.push_back(thin_code(DType::kBFloat16, Format::kNvfp4, config, 2));
  }
  codes.push_back(thin_code(DType::kFloat16, Format::kInt4, 0, 1));
  return codes;
}
std::vector<DeviceCode> mma_device_code() {
  std::vector<DeviceCode> codes;
  for (const Format format : kFastFormats) codes.push_back(mma_code(DType::kBFloat16, format, 0));
  codes.push_back(mma_code(DType::kFloat16, Format::kNvfp4, 1));
  return codes;
}
uint64_t thin_source_hash() {
  return jit::source_hash(kThinSource);
}
uint64_t mma_source_hash() {
  return jit::source_hash(kMmaSource);
}

}  // namespace

constinit const registry::Kernel<Product> kCudaThin{.name = "cuda_thin",
                                                    .supports = supports_thin,
                                                    .configs = thin_configs,
                                                    .heuristic = thin_heuristic,
                                                    .run = run_thin,
                                                    .source_hash = thin_source_hash,
                                                    .device_code = thin_device_code};
constinit const registry::Kernel<Product> kCudaMma{.name = "cuda_mma",
                                                   .supports = supports_mma,
                                                   .configs = mma_configs,
                                                   .heuristic = mma_heuristic,
                                                   .run = run_mma,
                                                   .source_hash = mma_source_hash,
                                                   .device_code = mma_device_code};

}  // namespace kernel_pytorch::quantized_matmul
