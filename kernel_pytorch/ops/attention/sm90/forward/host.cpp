// Host side of the forward on Hopper: which tile a head size gets, tensor maps, the order of tiles, the launch.
#include <algorithm>
#include <atomic>
#include <vector>

#include "kernel_pytorch/base/error.h"
#include "kernel_pytorch/device/cuda/driver.h"
#include "kernel_pytorch/device/cuda/tensor_map.h"
#include "kernel_pytorch/jit/jit.h"
#include "kernel_pytorch/ops/attention/cuda/features.h"
#include "kernel_pytorch/ops/attention/operation.h"
#include "kernel_pytorch/ops/attention/sm90/forward/config.h"

namespace kernel_pytorch::attention {
namespace {

constexpr const char* kPlanSource = "kernel_pytorch/ops/attention/sm90/forward/plan.cuh";
constexpr const char* kSource = "kernel_pytorch/ops/attention/sm90/forward/kernel.cuh";

constexpr const char* kNeeds16Bit = "takes bf16 and fp16";
constexpr const char* kOddSize = "head sizes must be multiples of 8, up to 256";
constexpr const char* kMisaligned = "rows of query, key, value or output do not begin at multiples of 16 bytes";
constexpr const char* kManyRows = "there are too many rows, or too many sequences shorter than the longest";
constexpr const char* kNothing = "there is nothing to compute";
constexpr const char* kManyReads =
    "more than two of segments, mask, bias, block list and dropout do not fit its registers";
constexpr const char* kDropsAll = "a part of which dropout keeps nothing";
constexpr const char* kOddBlocks = "its tiles do not divide the block list's";

// Register pressure of the features beyond the products. kLight leaves registers for the queries, kFair does so if two
// warpgroups compute, kHeavy takes the registers of half a block of scores.
enum class Load : uint8_t { kLight, kFair, kMedium, kHeavy };

struct Variant {
  Sm90Config config;
  Load load;  // the heaviest that compiles without spilling
};

// By head tile, ascending, and of one tile the fastest first. The first tile that holds the problem's sizes is taken;
// the tuner may take the other tiles with enough registers.
// clang-format off
constexpr Variant kVariants[] = {
    {.config = {.head_size = 64, .value_size = 64, .warpgroups = 3, .key_block = 112, .stages = 2, .query_buffers = 2, .in_turns = true}, .load = Load::kLight},
    {.config = {.head_size = 64, .value_size = 64, .warpgroups = 2, .key_block = 128, .stages = 3, .query_in_registers = true, .in_turns = true}, .load = Load::kHeavy},
    {.config = {.head_size = 96, .value_size = 96, .warpgroups = 2, .key_block = 128, .stages = 3, .query_in_registers = true}, .load = Load::kFair},
    {.config = {.head_size = 96, .value_size = 96, .warpgroups = 2, .key_block = 128, .stages = 2, .query_buffers = 2, .in_turns = true}, .load = Load::kMedium},
    {.config = {.head_size = 96, .value_size = 96, .warpgroups = 2, .key_block = 64, .stages = 4, .query_in_registers = true}, .load = Load::kHeavy},
    {.config = {.head_size = 128, .value_size = 128, .warpgroups = 2, .key_block = 128, .stages = 3, .query_in_registers = true}, .load = Load::kFair},
    {.config = {.head_size = 128, .value_size = 128, .warpgroups = 2, .key_block = 128, .stages = 2, .query_buffers = 2, .in_turns = true}, .load = Load::kMedium},
    {.config = {.head_size = 128, .value_size = 128, .warpgroups = 2, .key_block = 64, .stages = 4, .query_in_registers = true}, .load = Load::kHeavy},
    {.config = {.head_size = 192, .value_size = 128, .warpgroups = 2, .key_block = 128, .stages = 2, .in_turns = true}, .load = Load::kMedium},
    {.config = {.head_size = 192, .value_size = 128, .warpgroups = 2, .key_block = 64, .stages = 3, .in_turns = true}, .load = Load::kHeavy},
    {.config = {.head_size = 192, .value_size = 192, .warpgroups = 2, .key_block = 112, .stages = 2, .in_turns = true}, .load = Load::kLight},
    {.config = {.head_size = 192, .value_size = 192, .warpgroups = 2, .key_block = 64, .stages = 3, .in_turns = true}, .load = Load::kHeavy},
    {.config = {.head_size = 256, .value_size = 256, .warpgroups = 2, .key_block = 80, .stages = 2, .in_turns = true}, .load = Load::kLight},
    {.config = {.head_size = 256, .value_size = 256, .warpgroups = 2, .key_block = 64, .stages = 2, .in_turns = true}, .load = Load::kHeavy},
};
// clang-format on
static_assert(std::ranges::all_of(kVariants, [](const Variant& variant) { return is_legal(variant.config); }));
constexpr int kVariantCount = static_cast<int>(std::size(kVariants));

// Options that read something for each score.
int reads_per_score(const Features& features) {
  return int{features.segments} + int{features.mask} + int{has_bias(features)} + int{features.blocks} +
         int{features.dropout};
}
constexpr int kMaximumReads = 2;

// `reads_captured`: score_mod loads something for each score. A part has rows in fp32 to read and to write.
Load load_of(const Features& features, bool reads_captured, bool is_part) {
  if (features.mask || features.dropout || features.float_bias || (features.score_mod && reads_captured) ||
      reads_per_score(features) > 1 || (is_part && features.softcap_after)) {
    return Load::kHeavy;
  }
  const bool caps_more_than_causal = features.softcap && (!features.right_bound || features.left_bound ||
                                                          features.packed || features.key_lengths || features.alibi);
  const bool compares_during_product =
      features.segments && (features.packed || features.key_lengths || features.alibi || features.softcap);
  const bool is_medium = compares_during_product || (features.blocks && (is_part || features.packed)) ||
                         features.bias || features.softcap_after || caps_more_than_causal || features.mask_mod ||
                         features.score_mod;
  return is_medium ? Load::kMedium : features.segments ? Load::kFair : Load::kLight;
}

constexpr int64_t kSectionBytes = 32 << 20;  // of keys and values that a section of heads reads again and again from L2
constexpr int64_t kMaximumTiles = 1 << 30;
constexpr int64_t kMaximumPackedTiles =
    1 << 22;  // counted as if every sequence were the longest: 4 bytes of scratch each

bool holds(const Sm90Config& config, const Sizes& sizes) {
  return config.head_size >= sizes.size && config.value_size >= sizes.value_size;
}

// Indices of the variants that a problem may run with.
std::vector<int> candidates(const ForwardProblem& problem) {
  const Sizes sizes = sizes_of(problem);
  const Load load =
      load_of(features_of(problem.scoring), !problem.scoring.captured.empty(), has_float_results(problem));
  std::vector<int> found;
  const Sm90Config* tile = nullptr;
  for (int i = 0; i < kVariantCount; ++i) {
    const Sm90Config& config = kVariants[i].config;
    if (!holds(config, sizes)) continue;
    if (tile == nullptr) tile = &config;
    if (config.head_size != tile->head_size || config.value_size != tile->value_size) break;
    const bool fits_registers = kVariants[i].load >= load;
    if (fits_registers && scoring_obstacle(problem.scoring, sm90_queries(config), config.key_block) == nullptr) {
      found.push_back(i);
    }
  }
  return found;
}

int64_t tile_count(const Sizes& sizes, const Sm90Config& config) {
  return divide_up(sizes.longest_query, sm90_queries(config)) * sizes.sequences * sizes.heads;
}

registry::Support supports(const ForwardProblem& problem, const DeviceInfo& device) {
  if (const char* obstacle = cuda_obstacle(problem.query.dtype, device)) return registry::Support::no(obstacle);
  if (const char* missing = feature_obstacle(device, CudaFeature::kWgmma)) return registry::Support::no(missing);
  if (size_of(problem.query.dtype) != 2) return registry::Support::no(kNeeds16Bit);
  const Sizes sizes = sizes_of(problem);
  const Sm90Config& largest = kVariants[kVariantCount - 1].config;
  if (!holds(largest, sizes) || sizes.size % 8 != 0 || sizes.value_size % 8 != 0)
    return registry::Support::no(kOddSize);
  if (problem.output.element_count() == 0 || sizes.keys == 0 || sizes.size == 0) return registry::Support::no(kNothing);
  if (!has_aligned_rows(problem.query) || !has_aligned_rows(problem.key) || !has_aligned_rows(problem.value) ||
      !has_aligned_rows(problem.output)) {
    return registry::Support::no(kMisaligned);
  }
  if (tile_count(sizes, largest) > (problem.scoring.is_packed() ? kMaximumPackedTiles : kMaximumTiles) ||
      sizes.queries > kMaximumTiles || sizes.keys > kMaximumTiles) {
    return registry::Support::no(kManyRows);
  }
  if (has_float_results(problem) && problem.scoring.is_packed() && !problem.accumulate) {
    return registry::Support::no(kFloatPacks);
  }
  if (problem.accumulate && problem.scoring.dropout_p >= 1) return registry::Support::no(kDropsAll);
  if (const char* obstacle = part_obstacle(problem.scoring)) return registry::Support::no(obstacle);
  if (reads_per_score(features_of(problem.scoring)) > kMaximumReads) return registry::Support::no(kManyReads);
  return candidates(problem).empty() ? registry::Support::no(kOddBlocks) : registry::Support::yes();
}

std::vector<std::string> configs(const ForwardProblem& problem, const DeviceInfo&) {
  std::vector<std::string> texts;
  for (int index : candidates(problem)) texts.push_back(config_text(kVariants[index].config));
  return texts;
}

DeviceCode code_of(const Sm90Config& config, const Features& features, DType dtype, DType result,
                   const std::string& generated = {}) {
  return {.source = kSource,
          .entry = concat("kernel_pytorch::attention::sm90_forward<", device_text(config), ", ", device_text(features),
                          ", ", element_type_name(dtype), ", ", element_type_name(result), ">"),
          .minimum_capability = 90,
          .architecture_specific = true,
          .generated = generated};
}

WalkTiles walk_tiles(const Sm90Config& config) {
  return {.over_keys = true, .rows = sm90_queries(config), .columns = config.key_block};
}

// Causal rows differ in length, those of windows at the beginning: the longest come first, and the shorter fill the
// gaps at the end. Heads are taken in sections, so that the keys and values of concurrent tiles stay in L2.
Sm90Order order_of(const Scoring& scoring, const Sizes& sizes, const Features& features, const Sm90Config& config) {
  const int64_t query_tiles = divide_up(sizes.longest_query, sm90_queries(config));
  const int64_t heads = sizes.sequences * sizes.heads;
  const bool longest_first = features.right_bound;
  const int64_t seen =
      std::min(scoring.window_left, sizes.longest_key) + sm90_queries(config);  // by a tile, to its left
  const int64_t keys = features.left_bound ? std::min(sizes.longest_key, seen) : sizes.longest_key;
  const int64_t head_bytes = keys * (sizes.size + sizes.value_size) * 2;
  const int64_t section = longest_first ? sizes.group() * std::max<int64_t>(1, kSectionBytes / head_bytes) : 1;
  return {.query_tiles = static_cast<int32_t>(query_tiles),
          .heads = static_cast<int32_t>(heads),
          .section_heads = static_cast<int32_t>(std::min(section, heads)),
          .total = static_cast<int32_t>(query_tiles * heads),
          .longest_first = longest_first};
}

// Launches that may run at the same time get different counters; each leaves its own at zero.
uint32_t next_counter() {
  static std::atomic<uint32_t> count{0};
  return count.fetch_add(1, std::memory_order_relaxed) % kSm90Counters;
}

// What the lengths of packed sequences depend on, and nothing else: few kernels are compiled for all features.
Features plan_features(const Features& features) {
  return {.right_bound = features.right_bound,
          .left_bound = features.left_bound,
          .key_lengths = features.key_lengths,
          .packed = true};
}
DeviceCode plan_code(const Features& features) {
  return {.source = kPlanSource,
          .entry = concat("kernel_pytorch::attention::sm90_plan_tiles<", device_text(plan_features(features)), ">"),
          .minimum_capability = 80,
          .architecture_specific = false};
}

// Launches the kernel that lists the tiles of packed sequences.
const Sm90Plan* plan_tiles(const ForwardProblem& problem, const Features& features, const Sm90Config& config,
                           ScoreArguments& score, Context& context) {
  static const std::string kLabel = "attention sm90 plan";
  static FeatureKernels kernels;
  const Sizes sizes = sizes_of(problem);
  CUkern_st* kernel = kernels.get(plan_features(features), 0, context, [&] { return plan_code(features); });
  const int64_t most = sizes.queries / sm90_queries(config) + sizes.sequences + 1;
  auto* plan = static_cast<Sm90Plan*>(
      context.scratch->allocate(sizeof(Sm90Plan) + static_cast<size_t>(most) * sizeof(Sm90PlannedTile)));
  int32_t tile_queries = sm90_queries(config);
  void* pointers[] = {&score, &tile_queries, &plan};
  cuda_device::LaunchShape shape;
  shape.block_x = 1024;
  cuda_device::launch(context, kernel, shape, pointers, kLabel);
  return plan;
}

Sm90ForwardArguments make_arguments(const ForwardProblem& problem, const Features& features, const Sm90Config& config,
                                    Context& context) {
  const Sizes sizes = sizes_of(problem);
  Sm90ForwardArguments arguments{};
  cuda_device::encode_tensor_map(problem.query, sm90_queries(config), arguments.query.words);
  cuda_device::encode_tensor_map(problem.key, config.key_block, arguments.key.words);
  cuda_device::encode_tensor_map(problem.value, config.key_block, arguments.value.words);
  arguments.score = score_arguments_of(problem.scoring, problem.query, problem.key, context);
  plan_segments(features, walk_tiles(config), arguments.score, context);
  arguments.exponent_scale = changes_scores(features) ? 1.0f : arguments.score.scale * kLog2e;
  arguments.order = order_of(problem.scoring, sizes, features, config);
  arguments.places = order_lists(features, arguments.score, true, sm90_queries(config), arguments.order.heads, context);
  arguments.output = problem.output.data;
  arguments.output_batch = problem.output.strides[0];
  arguments.output_head = problem.output.strides[1];
  arguments.output_query = problem.output.strides[2];
  arguments.value_size = static_cast<int32_t>(sizes.value_size);
  arguments.lse = problem.lse.is_present() ? problem.lse.as<float>() : nullptr;
  arguments.redo_links =
      static_cast<int32_t*>(context.scratch->allocate(static_cast<size_t>(arguments.order.total) * sizeof(int32_t)));
  if (features.packed) {
    arguments.plan = plan_tiles(problem, features, config, arguments.score, context);
    if (!problem.accumulate) {
      clear_rows_past_sequences(problem.output, problem.lse, problem.scoring.cu_seqlens_q, context);
    }
  }
  arguments.accumulates = problem.accumulate;
  if (problem.accumulate) {
    const int64_t warps = int64_t{arguments.order.total} * 4 * config.warpgroups;
    arguments.stored = static_cast<uint8_t*>(context.scratch->allocate(static_cast<size_t>(warps)));
  }
  arguments.counter_index = next_counter();
  arguments.careful = problem.scoring.batch_invariant;
  return arguments;
}

void run(const ForwardProblem& problem, int choice, Context& context) {
  static const std::string kLabel = "attention sm90";
  static FeatureKernels kernels;
  const int index = candidates(problem)[static_cast<size_t>(choice)];
  const Sm90Config& config = kVariants[index].config;
  const Features features = features_of(problem.scoring);
  const DType dtype = problem.query.dtype;
  const DType result = problem.output.dtype;
  const uint32_t variant =
      static_cast<uint32_t>(index) * 4 + (dtype == DType::kFloat16 ? 2 : 0) + (result == dtype ? 0 : 1);
  CUkern_st* kernel = kernels.get(features, variant, context, [&] {
    return code_of(config, features, dtype, result, program_text(problem.scoring));
  });
  Sm90ForwardArguments arguments = make_arguments(problem, features, config, context);
  cuda_device::LaunchShape shape;
  shape.grid_x =
      static_cast<unsigned>(std::min(arguments.order.total, std::max(context.info->cuda.multiprocessors, 1)));
  shape.block_x = static_cast<unsigned>(sm90_threads(config));
  shape.shared_bytes = static_cast<unsigned>(sm90_shared_bytes(config));
  shape.programmatic_dependent = true;
  void* pointers[] = {&arguments};
  cuda_device::launch(context, kernel, shape, pointers, kLabel);
}

uint64_t source_hash() {
  return jit::source_hash(kSource);
}

// Every feature in the tile that most models use, every tile without and with a causal mask, and what parts of a whole
// have of both.
std::vector<DeviceCode> device_code() {
  std::vector<DeviceCode> codes;
  constexpr DType kBf16 = DType::kBFloat16;
  const Features causal{.right_bound = true};
  codes.push_back(plan_code(causal));
  codes.push_back(list_order_code());
  codes.push_back(segment_plan_code(causal, {.over_keys = true, .rows = 128, .columns = 128}));
  for (const Variant& variant : kVariants) {
    if (variant.load <= Load::kFair || variant.config.head_size == 192) {
      codes.push_back(code_of(variant.config, {}, kBf16, kBf16));
      codes.push_back(code_of(variant.config, causal, kBf16, kBf16));
      if (variant.load < Load::kHeavy) codes.push_back(code_of(variant.config, causal, kBf16, DType::kFloat32));
    }
    if (variant.config.head_size != 128) continue;
    if (variant.load == Load::kFair) {
      codes.push_back(code_of(variant.config, causal, DType::kFloat16, DType::kFloat16));
      codes.push_back(code_of(variant.config, {}, kBf16, DType::kFloat32));
    }
    for (const NamedFeatures& named : compiled_features()) {
      const Features& features = named.features;
      const Load load = std::max(load_of(features, true, false), Load::kFair);
      if (features.block_map || load != variant.load || reads_per_score(features) > kMaximumReads) continue;
      codes.push_back(code_of(variant.config, features, kBf16, kBf16, named.generated));
      const bool is_rich = (features.sinks && features.left_bound) || (features.dropout && has_bias(features));
      if (is_rich) codes.push_back(code_of(variant.config, features, kBf16, DType::kFloat32, named.generated));
    }
  }
  return codes;
}

}  // namespace

constinit const registry::Kernel<ForwardProblem> kForwardSm90{.name = "sm90_wgmma",
                                                              .origin = registry::Origin::kOurs,
                                                              .supports = supports,
                                                              .configs = configs,
                                                              .heuristic = nullptr,
                                                              .run = run,
                                                              .source_hash = source_hash,
                                                              .device_code = device_code};

}  // namespace kernel_pytorch::attention
