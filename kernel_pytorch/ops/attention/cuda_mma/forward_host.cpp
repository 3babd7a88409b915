// cuda_mma, the forward that takes every option on every GPU since compute capability 8.0.
#include <algorithm>

#include "kernel_pytorch/base/error.h"
#include "kernel_pytorch/device/cuda/driver.h"
#include "kernel_pytorch/jit/jit.h"
#include "kernel_pytorch/ops/attention/cuda_mma/tiles.h"

namespace kernel_pytorch::attention {
namespace {

constexpr const char* kSource = "kernel_pytorch/ops/attention/cuda_mma/forward.cuh";

// By head size. Two blocks of rows for each warp halve what it reads of keys and values; heavy features need the
// registers themselves.
constexpr MmaTile kTiles[] = {
    {.size = 64, .value_size = 64, .slice = 64, .warps = 4, .row_blocks = 2, .columns = 64, .stages = 2},
    {.size = 96, .value_size = 96, .slice = 96, .warps = 4, .row_blocks = 2, .columns = 32, .stages = 2},
    {.size = 128, .value_size = 128, .slice = 128, .warps = 4, .row_blocks = 2, .columns = 32, .stages = 2},
    {.size = 192, .value_size = 128, .slice = 128, .warps = 4, .columns = 64, .stages = 2},
    {.size = 192, .value_size = 192, .slice = 192, .warps = 4, .columns = 32, .stages = 2},
    {.size = 256, .value_size = 256, .slice = 256, .warps = 4, .columns = 32, .stages = 2},
    {.size = 512, .value_size = 512, .slice = 256, .warps = 4, .columns = 32, .stages = 2},
};
static_assert(are_legal(kTiles));
constexpr MmaTile kHeavyTiles[] = {
    {.size = 64, .value_size = 64, .slice = 64, .warps = 4, .columns = 64, .stages = 2},
    {.size = 96, .value_size = 96, .slice = 96, .warps = 4, .columns = 64, .stages = 2},
    {.size = 128, .value_size = 128, .slice = 128, .warps = 4, .columns = 64, .stages = 2},
    {.size = 192, .value_size = 128, .slice = 128, .warps = 4, .columns = 32, .stages = 2},
    {.size = 192, .value_size = 192, .slice = 192, .warps = 4, .columns = 32, .stages = 2},
    {.size = 256, .value_size = 256, .slice = 256, .warps = 4, .columns = 32, .stages = 2},
    {.size = 512, .value_size = 512, .slice = 256, .warps = 4, .columns = 32, .stages = 2},
};
static_assert(are_legal(kHeavyTiles));

// Tiles for fp32, whose split operands take registers too.
constexpr MmaTile kFloatTiles[] = {
    {.size = 64, .value_size = 64, .slice = 64, .warps = 4, .columns = 32, .stages = 2, .bytes = 4},
    {.size = 96, .value_size = 96, .slice = 96, .warps = 4, .columns = 32, .stages = 2, .bytes = 4},
    {.size = 128, .value_size = 128, .slice = 128, .warps = 8, .columns = 32, .stages = 2, .bytes = 4},
    {.size = 192, .value_size = 128, .slice = 128, .warps = 4, .columns = 16, .stages = 2, .bytes = 4},
    {.size = 192, .value_size = 192, .slice = 192, .warps = 4, .columns = 16, .stages = 2, .bytes = 4},
    {.size = 256, .value_size = 256, .slice = 256, .warps = 4, .columns = 16, .stages = 2, .bytes = 4},
    {.size = 512, .value_size = 512, .slice = 128, .warps = 2, .columns = 16, .stages = 1, .bytes = 4},
};
static_assert(are_legal(kFloatTiles));
// Two blocks of rows for each warp, where the compiler has registers for them.
constexpr MmaTile kHopperFloatTile{
    .size = 64, .value_size = 64, .slice = 64, .warps = 4, .row_blocks = 2, .columns = 32, .stages = 2, .bytes = 4};
constexpr int kHopper = 90;

MmaTile fit(const MmaTile& tile, const DeviceInfo& device) {
  return fitted(tile, device, forward_shared_bytes, kAmdSlice);
}
// Blocks of several slices would read an lse that the first one writes: slow on AMD's GPUs, and right.
MmaTile fit_whole(const MmaTile& tile, const DeviceInfo& device) {
  return fitted(tile, device, forward_shared_bytes, tile.slice);
}

MmaTile float_tile(int index, bool heavy, const DeviceInfo& device) {
  if (index == 0 && !heavy && has_feature(device, CudaFeature::kBulkCopy)) return kHopperFloatTile;
  return fit_whole(kFloatTiles[index], device);
}

struct Choice {
  int index;
  MmaTile tile;
  Features features;
};
Choice choose_tile(const ForwardProblem& problem, const DeviceInfo& device) {
  const DType dtype = problem.query.dtype;
  const int index = tile_for(kTiles, problem.query.size(3), problem.value.size(3));
  const bool heavy = is_heavy(features_of(problem.scoring), dtype);
  const MmaTile& wide = heavy ? kHeavyTiles[index] : kTiles[index];
  const MmaTile tile = dtype == DType::kFloat32 ? float_tile(index, heavy, device)
                       : problem.accumulate     ? fit_whole(wide, device)
                                                : fit(wide, device);
  return {index, tile, mma_features_of(problem.scoring, dtype, rows_of(tile), tile.columns)};
}

registry::Support supports(const ForwardProblem& problem, const DeviceInfo& device) {
  if (const char* obstacle = mma_obstacle(problem.query, problem.key, problem.value, device)) {
    return registry::Support::no(obstacle);
  }
  const MmaTile tile = choose_tile(problem, device).tile;
  if (forward_shared_bytes(tile) > device.cuda.shared_bytes_per_block) return registry::Support::no(kMmaSharedMemory);
  if (has_float_results(problem) && problem.scoring.is_packed() && !problem.accumulate) {
    return registry::Support::no(kFloatPacks);
  }
  if (problem.accumulate && tile.slice < problem.value.size(3)) return registry::Support::no(kMmaSlicedParts);
  if (const char* obstacle = part_obstacle(problem.scoring)) return registry::Support::no(obstacle);
  return registry::Support::unless(captured_obstacle(problem.scoring));
}

std::vector<std::string> configs(const ForwardProblem& problem, const DeviceInfo& device) {
  return {config_text(choose_tile(problem, device).tile)};
}

void run(const ForwardProblem& problem, int, Context& context) {
  static const std::string kLabel = "attention_forward/cuda_mma";
  static FeatureKernels kernels;
  const Choice choice = choose_tile(problem, *context.info);
  const MmaTile& tile = choice.tile;
  MmaForwardArguments arguments{};
  const bool vectors = fill_forward_arguments(problem, choice.features, context, arguments);
  arguments.tiles = static_cast<int32_t>(divide_up(arguments.scores.queries, rows_of(tile)));
  const int64_t blocks = int64_t{arguments.tiles} * arguments.scores.heads * arguments.scores.batches *
                         slices_of(tile.value_size, tile.slice);
  if (blocks == 0) return;
  const int64_t heads = int64_t{arguments.scores.heads} * arguments.scores.batches;
  arguments.places = order_lists(choice.features, arguments.scores, true, rows_of(tile), heads, context);
  KP_CHECK(blocks <= 0x7fffffff, "attention: ", blocks, " tiles of queries are more than a launch can have");

  const DType dtype = problem.query.dtype;
  const uint32_t variant = static_cast<uint32_t>(choice.index) * 16 + (problem.accumulate ? 8u : 0u) +
                           static_cast<uint32_t>(cuda_type_index(dtype)) * 2 + (vectors ? 1u : 0u);
  CUkern_st* kernel = kernels.get(choice.features, variant, context, [&] {
    return mma_code(kSource, "mma_forward", {choice.features, dtype, tile, vectors}, program_text(problem.scoring));
  });
  void* pointers[] = {&arguments};
  cuda_device::LaunchShape shape;
  shape.grid_x = static_cast<unsigned>(blocks);
  shape.block_x = static_cast<unsigned>(tile.warps * 32);
  shape.shared_bytes = static_cast<unsigned>(forward_shared_bytes(tile));
  cuda_device::launch(context, kernel, shape, pointers, kLabel);
}

uint64_t source_hash() {
  return jit::source_hash(kSource);
}

std::vector<DeviceCode> device_code() {
  std::vector<DeviceCode> codes = codes_by_shared_memory([](const DeviceInfo& gpu) {
    const auto on_gpu = [&](std::span<const MmaTile> tiles) { return tiles_on(gpu, tiles, fit, forward_shared_bytes); };
    std::vector<DeviceCode> all = mma_codes(kSource, "mma_forward", on_gpu(kTiles), on_gpu(kHeavyTiles));
    const std::vector<MmaTile> tiles = tiles_on(gpu, kFloatTiles, fit_whole, forward_shared_bytes);
    for (DeviceCode& code : mma_float_codes(kSource, "mma_forward", tiles, tiles, 128)) all.push_back(std::move(code));
    return all;
  });
  Features causal;
  causal.right_bound = true;
  codes.push_back(mma_code(kSource, "mma_forward", {causal, DType::kFloat32, kHopperFloatTile, true}, ""));
  codes.back().minimum_capability = kHopper;
  for (DeviceCode& code : prepare_codes()) codes.push_back(std::move(code));
  return codes;
}

}  // namespace

constinit const registry::Kernel<ForwardProblem> kForwardCudaMma{.name = "cuda_mma",
                                                                 .origin = registry::Origin::kOurs,
                                                                 .supports = supports,
                                                                 .configs = configs,
                                                                 .heuristic = nullptr,
                                                                 .run = run,
                                                                 .source_hash = source_hash,
                                                                 .device_code = device_code};

}  // namespace kernel_pytorch::attention
