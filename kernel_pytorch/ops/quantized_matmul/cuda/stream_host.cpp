// Host side of the product with a weight in few bits by blocks that stay: how many parts of k and rounds a problem has.
#include <algorithm>
#include <limits>
#include <string>
#include <vector>

#include "kernel_pytorch/base/config_fields.h"
#include "kernel_pytorch/base/error.h"
#include "kernel_pytorch/device/cuda/driver.h"
#include "kernel_pytorch/jit/jit.h"
#include "kernel_pytorch/ops/quantized_matmul/cuda/host.h"
#include "kernel_pytorch/ops/support/cuda_support.h"

namespace kernel_pytorch::quantized_matmul {

constexpr auto kStreamConfigFields =
    config_fields<StreamConfig>(config_field<&StreamConfig::warps>(), config_field<&StreamConfig::k_warps>(),
                                config_field<&StreamConfig::tiles>(), config_field<&StreamConfig::stages>());
constexpr ConfigFields fields_of(const StreamConfig&) {
  return kStreamConfigFields;
}

namespace {

constexpr const char* kSource = "kernel_pytorch/ops/quantized_matmul/cuda/stream.cuh";
constexpr const char* kFewRows = "takes 1 to 4 rows; of more, cuda_thin is as fast";
constexpr int64_t kMostRows = 4;
constexpr const char* kShared = "needs more shared memory for x than a block has";

// Behind a row, nvfp4 on an H200: microseconds of one row by 57344 x 8192, 14336 x 4096 and 8192 x 8192.
constexpr StreamConfig kConfigs[] = {
    {.warps = 16, .k_warps = 4, .tiles = 1, .stages = 3},  // 109.4, 18.5, 19.2
    {.warps = 32, .k_warps = 8, .tiles = 1, .stages = 2},  // 107.1, 19.2, 19.1
    {.warps = 16, .k_warps = 8, .tiles = 2, .stages = 3},  // 112.6, 20.1, 20.3
};
static_assert(are_legal(kConfigs));
constexpr int kConfigCount = static_cast<int>(std::size(kConfigs));

struct Plan {
  int64_t tiles, rounds, parts;  // parts 0: none
  int64_t shared_bytes;
  int64_t blocks;  // of threads
};

// Groups that are whole blocks of k: their scales can be applied to sums, which every lane needs the scale for.
bool is_late(const Product& problem) {
  constexpr int64_t kSpan = span_of(Format::kInt4);
  return problem.format == Format::kInt4 && problem.group == kSpan && problem.x.sizes[1] % kSpan == 0;
}

// As few parts of k as x needs to lie in shared memory.
Plan plan_of(const Product& problem, const StreamConfig& config, const DeviceInfo& device) {
  const int64_t m = problem.x.sizes[0], k = std::max<int64_t>(problem.x.sizes[1], 1), n = problem.codes.sizes[0];
  const int64_t span = span_of(problem.format), multiprocessors = std::max(device.cuda.multiprocessors, 1);
  const int64_t fixed = stream_part_bytes(config) + stream_ring_bytes(problem.format, config);
  const int64_t tiles = divide_up(n, stream_columns(config));
  for (int64_t parts = 1; parts <= multiprocessors; ++parts) {
    const int64_t rounds = divide_up(k, parts * config.k_warps * span);
    const int64_t blocks_of_k = rounds * config.k_warps;
    const int64_t x_sums = is_late(problem) ? blocks_of_k * kStreamRows * 4 : 0;
    const int64_t shared = fixed + blocks_of_k * span * 2 * m + x_sums;
    if (shared <= device.cuda.shared_bytes_per_block - 16) {  // and is_last
      const int64_t blocks = std::min(tiles, multiprocessors / parts) * parts;
      return {.tiles = tiles, .rounds = rounds, .parts = parts, .shared_bytes = shared, .blocks = blocks};
    }
    if (rounds == 1) break;
  }
  return {};
}

registry::Support supports(const Product& problem, const DeviceInfo& device) {
  if (const char* obstacle = cuda_weight_obstacle(problem, device)) return registry::Support::no(obstacle);
  const int64_t m = problem.x.sizes[0];
  if (m < 1 || m > kMostRows) return registry::Support::no(kFewRows);
  const auto fits = [&](const StreamConfig& config) { return plan_of(problem, config, device).parts > 0; };
  return registry::Support::unless(std::ranges::all_of(kConfigs, fits) ? nullptr : kShared);
}

std::vector<std::string> configs(const Product&, const DeviceInfo&) {
  return config_texts(kConfigs);
}

// The least columns times k of the blocks that have most, a sixteenth more for each part of k, which has to be added;
// of equal ones the first.
int heuristic(const Product& problem, const DeviceInfo& device) {
  int best = 0;
  int64_t least = std::numeric_limits<int64_t>::max();
  for (int i = 0; i < kConfigCount; ++i) {
    const Plan plan = plan_of(problem, kConfigs[i], device);
    if (plan.parts == 0 || plan.tiles == 0) continue;
    const int64_t work = divide_up(plan.tiles, plan.blocks / plan.parts) * stream_columns(kConfigs[i]) * plan.rounds *
                         kConfigs[i].k_warps;
    const int64_t cost = work * (15 + plan.parts);
    if (cost < least) {
      least = cost;
      best = i;
    }
  }
  return best;
}

DeviceCode code_of(DType dtype, Format format, bool late, int config) {
  return {.source = kSource,
          .entry = concat("kernel_pytorch::quantized_matmul::stream_product<", element_type_name(dtype), ", ",
                          cuda_format_name(format), ", ", bool_name(late), ", ", device_text(kConfigs[config]), ">"),
          .minimum_capability = 80,
          .architecture_specific = false};
}

void run(const Product& problem, int config, Context& context) {
  static const std::string kLabel = "quantized_matmul stream";
  static KernelTable<kVariants * kConfigCount * 2> kernels;
  if (problem.codes.sizes[0] == 0) return;
  const bool late = is_late(problem);
  const int entry = (variant_of(problem) * kConfigCount + config) * 2 + (late ? 1 : 0);
  CUkern_st* kernel =
      kernels.get(entry, context, [&] { return code_of(problem.x.dtype, problem.format, late, config); });
  const Plan plan = plan_of(problem, kConfigs[config], *context.info);
  StreamArguments arguments{};
  arguments.product = cuda_arguments(problem);
  arguments.tiles = static_cast<int32_t>(plan.tiles);
  arguments.rounds = static_cast<int32_t>(plan.rounds);
  arguments.parts = static_cast<int32_t>(plan.parts);
  if (plan.parts > 1) {
    const int64_t sums = plan.tiles * plan.parts * kStreamRows * stream_columns(kConfigs[config]);
    const size_t counters = static_cast<size_t>(plan.tiles) * sizeof(uint32_t);
    arguments.sums = static_cast<float*>(context.scratch->allocate(static_cast<size_t>(sums) * sizeof(float)));
    arguments.counters = static_cast<uint32_t*>(context.scratch->allocate(counters));
    cuda_device::fill_bytes(context.info->device.index, arguments.counters, 0, counters, context.stream);
  }
  cuda_device::LaunchShape shape;
  shape.grid_x = static_cast<unsigned>(plan.blocks);
  shape.block_x = static_cast<unsigned>(kConfigs[config].warps * 32);
  shape.shared_bytes = static_cast<unsigned>(plan.shared_bytes);
  shape.programmatic_dependent = context.info->cuda.capability() >= 90;
  void* pointers[] = {&arguments};
  cuda_device::launch(context, kernel, shape, pointers, kLabel);
}

std::vector<DeviceCode> device_code() {
  std::vector<DeviceCode> codes;
  for (int config = 0; config < kConfigCount; ++config) {
    for (const Format format : kFastFormats) codes.push_back(code_of(DType::kBFloat16, format, false, config));
    codes.push_back(code_of(DType::kBFloat16, Format::kInt4, true, config));
  }
  codes.push_back(code_of(DType::kFloat16, Format::kInt4, true, 0));
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
