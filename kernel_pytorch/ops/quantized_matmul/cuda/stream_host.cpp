// Host side of the product with a weight in few bits by blocks that stay: how many parts of k and steps a problem has.
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

constexpr auto kStreamConfigFields = config_fields<StreamConfig>(
    config_field<&StreamConfig::warps>(), config_field<&StreamConfig::k_warps>(), config_field<&StreamConfig::tiles>(),
    config_field<&StreamConfig::stages>(), config_field<&StreamConfig::box>());
constexpr ConfigFields fields_of(const StreamConfig&) {
  return kStreamConfigFields;
}

namespace {

constexpr const char* kSource = "kernel_pytorch/ops/quantized_matmul/cuda/stream.cuh";
constexpr const char* kFewRows = "takes one or two rows; of more, cuda_wgmma is faster";
constexpr int64_t kMostRows = 2;
constexpr const char* kShared = "needs more shared memory for x than a block has";

constexpr StreamConfig kConfigs[] = {
    {.warps = 8, .k_warps = 4, .tiles = 4, .stages = 4, .box = 128},
    {.warps = 16, .k_warps = 8, .tiles = 2, .stages = 4, .box = 128},
    {.warps = 16, .k_warps = 4, .tiles = 2, .stages = 4, .box = 128},  // the first one's stages, twice its warps
};
constexpr int kLarge = 0, kSmall = 1;
static_assert(are_legal(kConfigs));
constexpr int kConfigCount = static_cast<int>(std::size(kConfigs));
constexpr int kScalings = 3;

struct Plan {
  int64_t tiles, steps, parts;  // parts 0: none
  int64_t shared_bytes;
};

StreamScaling scaling_of(const Product& problem) {
  const int64_t k = problem.x.sizes[1];
  const bool are_words = k % 64 == 0 && reinterpret_cast<uintptr_t>(problem.scales.data) % 4 == 0;
  if (problem.x.sizes[0] == 1 && group_format::is_e2m1(problem.format) && are_words) return StreamScaling::kColumns;
  constexpr int64_t kSpan = span_of(Format::kInt4);
  const bool has_block_groups = problem.format == Format::kInt4 && problem.group == kSpan && k % kSpan == 0;
  return has_block_groups ? StreamScaling::kSums : StreamScaling::kPairs;
}
int rows_of(StreamScaling scaling) {
  return scaling == StreamScaling::kColumns ? 1 : kStreamRows;
}

// As few parts of k as x needs to lie in shared memory.
Plan plan_of(const Product& problem, const StreamConfig& config, const DeviceInfo& device) {
  const int64_t m = problem.x.sizes[0], k = std::max<int64_t>(problem.x.sizes[1], 1), n = problem.codes.sizes[0];
  const int64_t span = span_of(problem.format), multiprocessors = std::max(device.cuda.multiprocessors, 1);
  const StreamScaling scaling = scaling_of(problem);
  const int rows = rows_of(scaling);
  const int64_t fixed =
      stream_ring_bytes(problem.format, config) + kStreamBarrierBytes + stream_part_bytes(config, rows);
  for (int64_t parts = 1; parts <= multiprocessors; ++parts) {
    const int64_t steps = divide_up(k, parts * config.k_warps * span), blocks_of_k = steps * config.k_warps;
    const int64_t x_sums = scaling == StreamScaling::kSums ? blocks_of_k * rows * 4 : 0;
    const int64_t shared = fixed + blocks_of_k * span * 2 * m + x_sums;
    if (shared <= device.cuda.shared_bytes_per_block) {
      return {.tiles = divide_up(n, stream_columns(config)), .steps = steps, .parts = parts, .shared_bytes = shared};
    }
    if (steps == 1) break;
  }
  return {};
}

registry::Support supports(const Product& problem, const DeviceInfo& device) {
  if (const char* obstacle = cuda_weight_obstacle(problem, device)) return registry::Support::no(obstacle);
  if (const char* obstacle = window_obstacle(problem)) return registry::Support::no(obstacle);
  if (const char* missing = feature_obstacle(device, CudaFeature::kBulkCopy)) return registry::Support::no(missing);
  const int64_t m = problem.x.sizes[0];
  if (m < 1 || m > kMostRows || problem.x.sizes[1] == 0) return registry::Support::no(kFewRows);
  const auto fits = [&](const StreamConfig& config) { return plan_of(problem, config, device).parts > 0; };
  return registry::Support::unless(std::ranges::all_of(kConfigs, fits) ? nullptr : kShared);
}

std::vector<std::string> configs(const Product&, const DeviceInfo&) {
  return config_texts(kConfigs);
}

// Fewer rows of the weight in a tile where blocks have few tiles: less of them are of several blocks.
int heuristic(const Product& problem, const DeviceInfo& device) {
  const int64_t tiles = divide_up(problem.codes.sizes[0], stream_columns(kConfigs[kLarge]));
  return tiles >= 2 * device.cuda.multiprocessors ? kLarge : kSmall;
}

DeviceCode code_of(DType dtype, Format format, StreamScaling scaling, int config) {
  return {.source = kSource,
          .entry = concat("kernel_pytorch::quantized_matmul::stream_product<", element_type_name(dtype), ", ",
                          cuda_format_name(format), ", kernel_pytorch::quantized_matmul::StreamScaling(",
                          static_cast<int>(scaling), "), ", device_text(kConfigs[config]), ">"),
          .minimum_capability = 90,
          .architecture_specific = false};
}

void run(const Product& problem, int config, Context& context) {
  static const std::string kLabel = "quantized_matmul stream";
  static KernelTable<kVariants * kConfigCount * kScalings> kernels;
  if (problem.codes.sizes[0] == 0) return;
  const StreamScaling scaling = scaling_of(problem);
  const int entry = (variant_of(problem) * kConfigCount + config) * kScalings + static_cast<int>(scaling);
  CUkern_st* kernel =
      kernels.get(entry, context, [&] { return code_of(problem.x.dtype, problem.format, scaling, config); });
  const Plan plan = plan_of(problem, kConfigs[config], *context.info);
  const int64_t columns = stream_columns(kConfigs[config]);
  StreamArguments arguments{};
  arguments.product = cuda_arguments(problem);
  set_pieces(problem, kConfigs[config].k_warps * span_of(problem.format), &arguments.product.weight);
  const int64_t most_blocks = std::max<int64_t>(context.info->cuda.multiprocessors / plan.parts, 1);
  arguments.walk = walk_of(plan.tiles, plan.steps, most_blocks);
  arguments.parts = static_cast<int32_t>(plan.parts);
  const int64_t blocks = divide_up(plan.tiles * plan.steps, arguments.walk.steps_each) * plan.parts;
  if (plan.parts > 1 || arguments.walk.steps_each % plan.steps != 0) {
    const int64_t sums = plan.tiles * plan.parts * arguments.walk.most * rows_of(scaling) * columns;
    const size_t counters = static_cast<size_t>(plan.tiles) * sizeof(uint32_t);
    arguments.sums = static_cast<float*>(context.scratch->allocate(static_cast<size_t>(sums) * sizeof(float)));
    arguments.counters = static_cast<uint32_t*>(context.scratch->allocate(counters));
    cuda_device::fill_bytes(context.info->device.index, arguments.counters, 0, counters, context.stream);
  }
  cuda_device::encode_tensor_map(codes_view(problem), static_cast<int>(columns), arguments.codes.words, 1,
                                 kConfigs[config].box);
  cuda_device::LaunchShape shape;
  shape.grid_x = static_cast<unsigned>(blocks);
  shape.block_x = static_cast<unsigned>(kConfigs[config].warps * 32 + 32);
  shape.shared_bytes = static_cast<unsigned>(plan.shared_bytes);
  shape.programmatic_dependent = true;
  void* pointers[] = {&arguments};
  cuda_device::launch(context, kernel, shape, pointers, kLabel);
}

std::vector<DeviceCode> device_code() {
  std::vector<DeviceCode> codes;
  for (int config = 0; config < kConfigCount; ++config) {
    codes.push_back(code_of(DType::kBFloat16, Format::kNvfp4, StreamScaling::kColumns, config));
    codes.push_back(code_of(DType::kBFloat16, Format::kInt4, StreamScaling::kSums, config));
  }
  for (const Format format : kFastFormats) codes.push_back(code_of(DType::kBFloat16, format, StreamScaling::kPairs, 0));
  codes.push_back(code_of(DType::kBFloat16, Format::kMxfp4, StreamScaling::kColumns, 0));
  codes.push_back(code_of(DType::kFloat16, Format::kInt4, StreamScaling::kSums, 0));
  codes.push_back(code_of(DType::kFloat16, Format::kNvfp4, StreamScaling::kColumns, 0));
  return codes;
}
uint64_t source_hash() {
  return jit::source_hash(kSource);
}

}  // namespace

constinit const registry::Kernel<Product> kCudaStream{.name = "cuda_stream",
                                                      .supports = supports,
                                                      .configs = configs,
                                                      .heuristic = heuristic,
                                                      .run = run,
                                                      .source_hash = source_hash,
                                                      .device_code = device_code};

}  // namespace kernel_pytorch::quantized_matmul
