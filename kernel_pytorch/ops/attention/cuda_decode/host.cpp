// cuda_decode: the forward of few queries over many keys, bound by memory. Every option; heads up to 256, of fp32 128.
#include <algorithm>
#include <cmath>

#include "kernel_pytorch/base/error.h"
#include "kernel_pytorch/device/cuda/driver.h"
#include "kernel_pytorch/jit/jit.h"
#include "kernel_pytorch/ops/attention/cuda_mma/tiles.h"

namespace kernel_pytorch::attention {
namespace {

constexpr const char* kSource = "kernel_pytorch/ops/attention/cuda_decode/kernel.cuh";
constexpr const char* kManyQueries = "is for few queries: up to 64 rows of the heads that share keys, or 16 of a head";
constexpr const char* kLargeHeads = "takes heads of up to 256 columns, of fp32 up to 128";

// By head size: about 100 KB of keys and values under way, two blocks on a multiprocessor.
constexpr MmaTile kTiles[] = {
    {.size = 64, .value_size = 64, .slice = 64, .warps = 4, .columns = 16, .stages = 5},
    {.size = 96, .value_size = 96, .slice = 96, .warps = 4, .columns = 16, .stages = 4},
    {.size = 128, .value_size = 128, .slice = 128, .warps = 4, .columns = 16, .stages = 3},
    {.size = 192, .value_size = 128, .slice = 128, .warps = 4, .columns = 16, .stages = 2},
    {.size = 192, .value_size = 192, .slice = 192, .warps = 4, .columns = 16, .stages = 2},
    {.size = 256, .value_size = 256, .slice = 256, .warps = 4, .columns = 16, .stages = 2},
};
static_assert(are_legal(kTiles));
constexpr MmaTile kFloatTiles[] = {
    {.size = 64, .value_size = 64, .slice = 64, .warps = 4, .columns = 16, .stages = 3, .bytes = 4},
    {.size = 96, .value_size = 96, .slice = 96, .warps = 4, .columns = 16, .stages = 2, .bytes = 4},
    {.size = 128, .value_size = 128, .slice = 128, .warps = 4, .columns = 16, .stages = 2, .bytes = 4},
};
static_assert(are_legal(kFloatTiles));
constexpr int64_t kPackedRows = 64, kHeadRows = 16;
constexpr int kInvariantKeys = 1024;  // of a split, whatever the batch
constexpr int64_t kLeastKeys = 256;   // that pay for a split

// What depends on the head alone, of which rows of several heads know nothing.
bool is_same_for_all_heads(const Features& features) {
  return !features.segments && !features.mask && !features.mask_mod && !features.block_map && !features.alibi &&
         !has_bias(features) && !features.score_mod && !features.dropout;
}

struct Plan {
  int index;
  MmaTile tile;
  Features features;
  bool packs;
  int64_t rows;  // that share keys
  int64_t units;
};

Features decode_features_of(const Scoring& scoring, DType dtype) {
  Features features = mma_features_of(scoring, dtype, kDecodeRows, kDecodeKeys);
  features.block_map = features.block_map || features.blocks;  // a split is no walk over lists
  features.blocks = false;
  return features;
}

Plan plan_of(const ForwardProblem& problem) {
  const Sizes sizes = sizes_of(problem);
  Plan plan{};
  const std::span<const MmaTile> tiles =
      problem.query.dtype == DType::kFloat32 ? std::span<const MmaTile>(kFloatTiles) : std::span<const MmaTile>(kTiles);
  plan.index = tile_for(tiles, sizes.size, sizes.value_size);
  if (plan.index >= 0) plan.tile = tiles[static_cast<size_t>(plan.index)];
  plan.features = decode_features_of(problem.scoring, problem.query.dtype);
  plan.packs = sizes.group() > 1 && is_same_for_all_heads(plan.features);
  plan.rows = sizes.longest_query * (plan.packs ? sizes.group() : 1);
  plan.units = sizes.sequences * (plan.packs ? sizes.key_heads : sizes.heads);
  return plan;
}

registry::Support supports(const ForwardProblem& problem, const DeviceInfo& device) {
  if (const char* obstacle = mma_obstacle(problem.query, problem.key, problem.value, device)) {
    return registry::Support::no(obstacle);
  }
  const Plan plan = plan_of(problem);
  if (plan.index < 0) return registry::Support::no(kLargeHeads);
  if (plan.rows > (plan.packs ? kPackedRows : kHeadRows)) return registry::Support::no(kManyQueries);
  if (decode_shared_bytes(plan.tile) > device.cuda.shared_bytes_per_block) {
    return registry::Support::no(kMmaSharedMemory);
  }
  if (has_float_results(problem) || problem.accumulate) return registry::Support::no(kNoFloatResults);
  if (const char* obstacle = part_obstacle(problem.scoring)) return registry::Support::no(obstacle);
  return registry::Support::unless(captured_obstacle(problem.scoring));
}

// The fewest splits that fill the machine's blocks, or nearly.
int64_t choose_splits(int64_t blocks, int64_t keys, int64_t slots) {
  int64_t best = 1;
  double best_share = 0;
  for (int64_t splits = 1; splits <= std::clamp<int64_t>(keys / kLeastKeys, 1, 64); ++splits) {
    const double waves = static_cast<double>(blocks * splits) / static_cast<double>(slots);
    const double share = waves / std::max(1.0, std::ceil(waves));
    if (share > best_share + 0.02) best = splits, best_share = share;
    if (share >= 0.9) break;
  }
  return best;
}

void set_splits(DecodeArguments& arguments, const ForwardProblem& problem, const Plan& plan, Context& context) {
  const int64_t keys = std::max<int64_t>(arguments.forward.scores.keys, 1);
  if (problem.scoring.batch_invariant) {
    arguments.split_keys = kInvariantKeys;
    arguments.splits = static_cast<int32_t>(divide_up(keys, kInvariantKeys));
  } else {
    const int64_t slots = 2 * context.info->cuda.multiprocessors;
    arguments.splits = static_cast<int32_t>(choose_splits(plan.units * arguments.forward.tiles, keys, slots));
  }
  if (arguments.splits == 1) return;
  const int64_t rows = problem.query.size(0) * problem.query.size(1) * problem.query.size(2) * arguments.splits;
  const size_t row_bytes = sizeof(float) * static_cast<size_t>(rows);
  arguments.partial_lse = static_cast<float*>(context.scratch->allocate(row_bytes));
  arguments.partial =
      static_cast<float*>(context.scratch->allocate(row_bytes * static_cast<size_t>(arguments.forward.value_size)));
}

DeviceCode decode_code(const MmaVariant& variant, bool packs, const std::string& generated) {
  return mma_code(kSource, "decode", variant, generated, bool_name(packs));
}
DeviceCode combine_code(const Features& features, DType dtype) {
  DeviceCode code;
  code.source = kSource;
  code.entry =
      concat("kernel_pytorch::attention::decode_combine<", device_text(features), ", ", element_type_name(dtype), ">");
  return code;
}
// All that the combining kernel asks of the features.
Features combine_features(const Features& features) {
  Features few;
  few.packed = features.packed;
  few.sinks = features.sinks;
  few.dropout = features.dropout;
  return few;
}

void launch(Context& context, CUkern_st* kernel, int64_t blocks, int shared_bytes, DecodeArguments& arguments) {
  static const std::string kLabel = "attention_forward/cuda_decode";
  KP_CHECK(blocks <= 0x7fffffff, "attention: ", blocks, " blocks are more than a launch can have");
  void* pointers[] = {&arguments};
  cuda_device::LaunchShape shape;
  shape.grid_x = static_cast<unsigned>(blocks);
  shape.block_x = 128;
  shape.shared_bytes = static_cast<unsigned>(shared_bytes);
  cuda_device::launch(context, kernel, shape, pointers, kLabel);
}

std::vector<std::string> configs(const ForwardProblem& problem, const DeviceInfo&) {
  return {config_text(plan_of(problem).tile)};
}

void run(const ForwardProblem& problem, int, Context& context) {
  static FeatureKernels kernels, combiners;
  const Plan plan = plan_of(problem);
  const MmaTile& tile = plan.tile;
  DecodeArguments arguments{};
  MmaForwardArguments& forward = arguments.forward;
  const bool vectors = fill_forward_arguments(problem, plan.features, context, forward);
  forward.tiles = static_cast<int32_t>(divide_up(plan.rows, kDecodeRows));
  if (plan.units * forward.tiles == 0) return;
  set_splits(arguments, problem, plan, context);

  const DType dtype = problem.query.dtype;
  const auto type = static_cast<uint32_t>(cuda_type_index(dtype));
  const uint32_t variant =
      static_cast<uint32_t>(plan.index) << 4 | (plan.packs ? 8u : 0u) | type << 1 | (vectors ? 1u : 0u);
  CUkern_st* kernel = kernels.get(plan.features, variant, context, [&] {
    return decode_code({plan.features, dtype, tile, vectors}, plan.packs, program_text(problem.scoring));
  });
  launch(context, kernel, plan.units * forward.tiles * arguments.splits, decode_shared_bytes(tile), arguments);
  if (arguments.splits == 1) return;
  const Features few = combine_features(plan.features);
  CUkern_st* combiner = combiners.get(few, type, context, [&] { return combine_code(few, dtype); });
  const ScoreArguments& scores = forward.scores;
  launch(context, combiner, int64_t{scores.batches} * scores.heads * scores.queries, 0, arguments);
}

uint64_t source_hash() {
  return jit::source_hash(kSource);
}

std::vector<DeviceCode> device_code() {
  std::vector<DeviceCode> codes;
  Features causal;
  causal.right_bound = causal.key_lengths = true;
  const auto add = [&](const Features& features, DType dtype, const MmaTile& tile, bool packs) {
    codes.push_back(decode_code({features, dtype, tile, true}, packs, ""));
    codes.back().least_shared_kib = static_cast<int>(divide_up(decode_shared_bytes(tile), 1024));
  };
  for (const MmaTile& tile : kTiles) add(causal, DType::kBFloat16, tile, true);
  Features alibi = causal;
  alibi.alibi = alibi.alibi_is_one_sided = alibi.segments = true;
  add(alibi, DType::kFloat16, kTiles[2], false);
  for (const MmaTile& tile : kFloatTiles) add(causal, DType::kFloat32, tile, true);
  add(alibi, DType::kFloat32, kFloatTiles[2], false);
  codes.push_back(combine_code({}, DType::kBFloat16));
  return codes;
}

}  // namespace

constinit const registry::Kernel<ForwardProblem> kForwardCudaDecode{.name = "cuda_decode",
                                                                    .origin = registry::Origin::kOurs,
                                                                    .supports = supports,
                                                                    .configs = configs,
                                                                    .heuristic = nullptr,
                                                                    .run = run,
                                                                    .source_hash = source_hash,
                                                                    .device_code = device_code};

}  // namespace kernel_pytorch::attention
