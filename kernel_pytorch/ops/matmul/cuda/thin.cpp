// Host side of products of at most 16 rows with a 16-bit weight whose rows lie along k (decoding).
#include <algorithm>
#include <string>
#include <vector>

#include "kernel_pytorch/base/config_fields.h"
#include "kernel_pytorch/base/error.h"
#include "kernel_pytorch/device/cuda/driver.h"
#include "kernel_pytorch/jit/jit.h"
#include "kernel_pytorch/ops/engines/gemm/thin/thin_cuda.h"
#include "kernel_pytorch/ops/matmul/cuda/tile.h"
#include "kernel_pytorch/ops/matmul/operation.h"
#include "kernel_pytorch/ops/support/cuda_support.h"

namespace kernel_pytorch::product {

constexpr auto kThinConfigFields =
    config_fields<ThinConfig>(config_field<&ThinConfig::columns>(), config_field<&ThinConfig::warps>());
constexpr ConfigFields fields_of(const ThinConfig&) {
  return kThinConfigFields;
}

}  // namespace kernel_pytorch::product

namespace kernel_pytorch::matmul {
namespace {

using product::ThinConfig;

constexpr const char* kThinSource = "kernel_pytorch/ops/engines/gemm/thin/kernel.cuh";
constexpr const char* kThinNeeds16Bit = "takes bf16 and fp16";
constexpr const char* kThinManyRows = "takes 1 to 16 rows";
constexpr const char* kThinOrder =
    "needs rows of a and columns of b that lie along k and begin at multiples of 16 bytes";
constexpr const char* kThinUp = "needs up to lie in memory as b does";
constexpr const char* kThinDepth = "needs k to be a multiple of 8, below 2^30";
constexpr const char* kThinLarge = "n is 2^30 or more, or there are more than 65535 products";
constexpr const char* kThinRowSums = "sums no rows";

constexpr ThinConfig kThinConfigs[] = {
    {.columns = 16, .warps = 16}, {.columns = 16, .warps = 8}, {.columns = 16, .warps = 4},
    {.columns = 32, .warps = 16}, {.columns = 32, .warps = 8}, {.columns = 32, .warps = 4},
};
static_assert(are_legal(kThinConfigs));
constexpr int kThinConfigCount = static_cast<int>(std::size(kThinConfigs));

registry::Support supports_thin(const Product& problem, const DeviceInfo& device) {
  if (const char* obstacle = cuda_obstacle(problem.a.dtype, device)) return registry::Support::no(obstacle);
  if (size_of(problem.a.dtype) != 2) return registry::Support::no(kThinNeeds16Bit);
  const Sizes sizes = sizes_of(problem);
  if (sizes.m < 1 || sizes.m > product::kThinRows) return registry::Support::no(kThinManyRows);
  const bool is_along_k = is_row_major(problem.a) && !is_row_major(problem.b);
  if (!is_along_k || !has_aligned_lines(problem.a) || !has_aligned_lines(problem.b)) {
    return registry::Support::no(kThinOrder);
  }
  if (problem.up.is_present() && (!has_aligned_lines(problem.up) || !is_like_b(problem.up, problem))) {
    return registry::Support::no(kThinUp);
  }
  if (sizes.k % 8 != 0 || sizes.k >= int64_t{1} << 30) return registry::Support::no(kThinDepth);
  if (sizes.n >= int64_t{1} << 30 || sizes.batch > 65535) return registry::Support::no(kThinLarge);
  return problem.row_sums.is_present() ? registry::Support::no(kThinRowSums) : registry::Support::yes();
}

std::vector<std::string> thin_configs(const Product&, const DeviceInfo&) {
  return config_texts(kThinConfigs);
}

// Sixteen warps where a multiprocessor gets one block, eight where it gets more, which are then resident together, and
// no more warps than have a step of k each. Each block reads all of a: more than eight rows are as many bytes as 16
// columns of the weight, so such blocks take 32 columns where there are enough of them.
int thin_heuristic(const Product& problem, const DeviceInfo& device) {
  const Sizes sizes = sizes_of(problem);
  const auto blocks = [&](int64_t columns) { return divide_up(sizes.n, columns) * sizes.batch; };
  const int multiprocessors = device.cuda.multiprocessors;
  const int columns = sizes.m > product::kThinRowTile && blocks(32) >= 2 * multiprocessors ? 32 : 16;
  const int64_t steps = divide_up(sizes.k, product::kThinBlock * product::kThinBlocks);
  const int warps = blocks(columns) <= multiprocessors && steps >= 16 ? 16 : steps >= 8 ? 8 : 4;
  const auto is_wanted = [&](const ThinConfig& config) { return config.columns == columns && config.warps == warps; };
  return static_cast<int>(std::ranges::find_if(kThinConfigs, is_wanted) - std::begin(kThinConfigs));
}

DeviceCode thin_code(DType dtype, int config, int row_tiles) {
  return {.source = kThinSource,
          .entry = concat("kernel_pytorch::product::thin_product<", element_type_name(dtype), ", ",
                          device_text(kThinConfigs[config]), ", ", row_tiles, ">"),
          .minimum_capability = 80,
          .architecture_specific = false};
}

void run_thin_cuda(const Product& problem, int config, Context& context) {
  static const std::string kLabel = "matmul thin";
  static KernelTable<2 * kThinConfigCount * 2> kernels;
  const Sizes sizes = sizes_of(problem);
  if (sizes.n == 0 || sizes.batch == 0) return;
  const int row_tiles = sizes.m > product::kThinRowTile ? 2 : 1;
  const int entry = ((problem.a.dtype == DType::kFloat16) * kThinConfigCount + config) * 2 + row_tiles - 1;
  CUkern_st* kernel = kernels.get(entry, context, [&] { return thin_code(problem.a.dtype, config, row_tiles); });
  product::TileArguments arguments = tile_arguments(problem);
  cuda_device::LaunchShape shape;
  shape.grid_x = static_cast<unsigned>(divide_up(sizes.n, kThinConfigs[config].columns));
  shape.grid_z = static_cast<unsigned>(sizes.batch);
  shape.block_x = static_cast<unsigned>(kThinConfigs[config].warps * 32);
  shape.programmatic_dependent = has_feature(*context.info, CudaFeature::kDependentLaunch);
  void* pointers[] = {&arguments};
  cuda_device::launch(context, kernel, shape, pointers, kLabel);
}

std::vector<DeviceCode> thin_device_code() {
  std::vector<DeviceCode> codes;
  for (int config = 0; config < kThinConfigCount; ++config) {
    for (const int row_tiles : {1, 2}) codes.push_back(thin_code(DType::kBFloat16, config, row_tiles));
  }
  return codes;
}

uint64_t thin_source_hash() {
  return jit::source_hash(kThinSource);
}

}  // namespace

constinit const registry::Kernel<Product> kThin{.name = "cuda_thin",
                                                .origin = registry::Origin::kOurs,
                                                .supports = supports_thin,
                                                .configs = thin_configs,
                                                .heuristic = thin_heuristic,
                                                .run = run_thin_cuda,
                                                .source_hash = thin_source_hash,
                                                .device_code = thin_device_code};

}  // namespace kernel_pytorch::matmul
