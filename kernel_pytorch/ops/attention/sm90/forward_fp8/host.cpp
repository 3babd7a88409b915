// Host side of the forward in FP8 on Hopper: codes and scales in memory of the call, tensor maps, the launch.
#include <algorithm>
#include <atomic>
#include <vector>

#include "kernel_pytorch/base/config_fields.h"
#include "kernel_pytorch/base/error.h"
#include "kernel_pytorch/device/cuda/driver.h"
#include "kernel_pytorch/device/cuda/tensor_map.h"
#include "kernel_pytorch/jit/jit.h"
#include "kernel_pytorch/ops/attention/bounds.h"
#include "kernel_pytorch/ops/attention/cuda/features.h"
#include "kernel_pytorch/ops/attention/fp8/rounding.h"
#include "kernel_pytorch/ops/attention/sm90/forward_fp8/tile_cuda.h"

namespace kernel_pytorch::attention::fp8 {

constexpr auto kConfigFields =
    config_fields<ForwardConfig>(config_field<&ForwardConfig::value_size>(), config_field<&ForwardConfig::stages>(),
                                 config_field<&ForwardConfig::in_turns>());
constexpr ConfigFields fields_of(const ForwardConfig&) {
  return kConfigFields;
}

namespace {

constexpr const char* kSource = "kernel_pytorch/ops/attention/sm90/forward_fp8/kernel.cuh";
constexpr const char* kOddSize = "head sizes must be at most 128, and value_size a multiple of 8";
constexpr const char* kMisaligned = "rows of output do not begin at multiples of 16 bytes";
constexpr const char* kNothing = "there is nothing to compute";
constexpr const char* kManyRows = "there are more than 2^30 rows, or tiles of 128 queries";
constexpr const char* kNeedsPositiveScale = "takes positive scales only";

// By value size, the fastest first.
// clang-format off
constexpr ForwardConfig kConfigs[] = {
    {.value_size = 64, .stages = 4, .in_turns = false},
    {.value_size = 64, .stages = 4, .in_turns = true},
    {.value_size = 128, .stages = 4, .in_turns = false},
    {.value_size = 128, .stages = 4, .in_turns = true},
};
// clang-format on
constexpr int64_t kMaximum = 1 << 30;
constexpr int64_t kSectionBytes = 32 << 20;  // of keys and values that a section of heads reads again and again from L2

std::vector<int> candidates(const Forward& problem) {
  std::vector<int> found;
  for (int i = 0; i < static_cast<int>(std::size(kConfigs)); ++i) {
    const bool is_small = problem.value.sizes[3] <= 64;
    if ((kConfigs[i].value_size == 64) == is_small) found.push_back(i);
  }
  return found;
}

registry::Support supports(const Forward& problem, const DeviceInfo& device) {
  if (const char* obstacle = cuda_obstacle(problem.query.dtype, device)) return registry::Support::no(obstacle);
  if (const char* missing = feature_obstacle(device, CudaFeature::kWgmma)) return registry::Support::no(missing);
  const auto& query = problem.query.sizes;
  const auto& value = problem.value.sizes;
  if (query[3] > kTile || value[3] > kTile || value[3] % 8 != 0) return registry::Support::no(kOddSize);
  if (!has_aligned_rows(problem.output)) return registry::Support::no(kMisaligned);
  if (problem.output.element_count() == 0 || value[2] == 0 || query[3] == 0) return registry::Support::no(kNothing);
  if (query[2] > kMaximum || value[2] > kMaximum || query[0] * query[1] * divide_up(query[2], kTile) > kMaximum) {
    return registry::Support::no(kManyRows);
  }
  return registry::Support::unless(*problem.scale > 0 ? nullptr : kNeedsPositiveScale);
}

std::vector<std::string> configs(const Forward& problem, const DeviceInfo&) {
  std::vector<std::string> texts;
  for (int index : candidates(problem)) texts.push_back(config_text(kConfigs[index]));
  return texts;
}

DeviceCode code_of(const ForwardConfig& config, const Features& features, DType result) {
  return {.source = kSource,
          .entry = concat("kernel_pytorch::attention::fp8::forward<", device_text(config), ", ", device_text(features),
                          ", ", element_type_name(result), ">"),
          .minimum_capability = 90,
          .architecture_specific = true};
}

// Codes of the three operands with their scales.
struct Codes {
  TensorView query{}, key{}, value{};
  float *query_scales = nullptr, *key_scales = nullptr, *value_scales = nullptr;
};
Codes make_codes(const Forward& problem, const ForwardConfig& config, Context& context) {
  const auto& query = problem.query.sizes;
  const auto& key = problem.key.sizes;
  const int64_t query_rows = divide_up(query[2], kTile) * kTile, key_rows = divide_up(key[2], kTile) * kTile;
  const auto bytes = [&](int64_t batch, int64_t heads, int64_t rows, int64_t columns) {
    TensorView view = contiguous_view(nullptr, DType::kFloat8E4M3, {batch, heads, rows, columns}, context.device());
    view.data = context.scratch->allocate(static_cast<size_t>(view.byte_count()));
    return view;
  };
  const auto scales = [&](int64_t count) {
    return static_cast<float*>(context.scratch->allocate(static_cast<size_t>(count) * sizeof(float)));
  };
  return {.query = bytes(query[0], query[1], query_rows, kTile),
          .key = bytes(key[0], key[1], key_rows, kTile),
          .value = bytes(key[0], key[1], config.value_size, key_rows),
          .query_scales = scales(query[0] * query[1] * query_rows / kTile),
          .key_scales = scales(key[0] * key[1] * key_rows / kTile),
          .value_scales = scales(key[0] * key[1] * key_rows / kTile)};
}

// The longest rows first where they differ in length, heads in sections whose keys and values stay in L2.
Sm90Order order_of(const Forward& problem, const Features& features) {
  const auto& query = problem.query.sizes;
  const int64_t query_tiles = divide_up(query[2], kTile), heads = query[0] * query[1];
  const int64_t group = query[1] / problem.key.sizes[1];
  int64_t keys = problem.key.sizes[2];
  if (features.left_bound) keys = std::min(keys, problem.window_left + kTile);
  const int64_t section = features.right_bound ? group * std::max<int64_t>(1, kSectionBytes / (keys * 2 * kTile)) : 1;
  return {.query_tiles = static_cast<int32_t>(query_tiles),
          .heads = static_cast<int32_t>(heads),
          .section_heads = static_cast<int32_t>(std::min(section, heads)),
          .total = static_cast<int32_t>(query_tiles * heads),
          .longest_first = features.right_bound};
}

// Launches that may run at the same time get different counters; each leaves its own at zero.
uint32_t next_counter() {
  static std::atomic<uint32_t> count{0};
  return count.fetch_add(1, std::memory_order_relaxed) % kSm90Counters;
}

void run(const Forward& problem, int choice, Context& context) {
  static const std::string kLabel = "attention_fp8 sm90";
  static FeatureKernels kernels;
  const int index = candidates(problem)[static_cast<size_t>(choice)];
  const ForwardConfig& config = kConfigs[index];
  const Codes codes = make_codes(problem, config, context);
  launch_rounding(
      {{problem.query, Target::kCodes, kTile, problem.rotate, codes.query, codes.query_scales},
       {problem.key, Target::kCodes, kTile, problem.rotate, codes.key, codes.key_scales},
       {problem.value, Target::kTransposedCodes, config.value_size, false, codes.value, codes.value_scales}},
      context);

  ForwardProblem whole = attention_of(problem, problem.query, problem.key, problem.value);
  const Sizes sizes = sizes_of(whole);
  if (!has_near_numbers(whole.scoring, sizes)) bound_numbers(whole.scoring, sizes);
  const Features features = features_of(whole.scoring);
  const DType result = problem.output.dtype;
  CUkern_st* kernel =
      kernels.get(features, static_cast<uint32_t>(index) * 4 + static_cast<uint32_t>(cuda_type_index(result)), context,
                  [&] { return code_of(config, features, result); });
  ForwardArguments arguments{};
  Sm90ForwardArguments& base = arguments.base;
  cuda_device::encode_tensor_map(codes.query, kTile, base.query.words);
  cuda_device::encode_tensor_map(codes.key, kTile, base.key.words);
  cuda_device::encode_tensor_map(codes.value, config.value_size, base.value.words);
  base.score = score_arguments_of(whole.scoring, whole.query, whole.key, context);
  base.exponent_scale = base.score.scale * kLog2e;
  base.order = order_of(problem, features);
  base.output = problem.output.data;
  base.output_batch = problem.output.strides[0];
  base.output_head = problem.output.strides[1];
  base.output_query = problem.output.strides[2];
  base.value_size = static_cast<int32_t>(problem.value.sizes[3]);
  base.lse = problem.lse.is_present() ? problem.lse.as<float>() : nullptr;
  base.counter_index = next_counter();
  arguments.query_scales = codes.query_scales;
  arguments.key_scales = codes.key_scales;
  arguments.value_scales = codes.value_scales;
  arguments.key_blocks = static_cast<int32_t>(codes.key.sizes[2] / kTile);
  cuda_device::LaunchShape shape;
  shape.grid_x = static_cast<unsigned>(std::min(base.order.total, std::max(context.info->cuda.multiprocessors, 1)));
  shape.block_x = kThreads;
  shape.shared_bytes = static_cast<unsigned>(shared_bytes(config));
  shape.programmatic_dependent = true;
  void* pointers[] = {&arguments};
  cuda_device::launch(context, kernel, shape, pointers, kLabel);
}

uint64_t source_hash() {
  return jit::source_hash(kSource);
}

std::vector<DeviceCode> device_code() {
  std::vector<DeviceCode> codes;
  const Features causal{.right_bound = true}, window{.right_bound = true, .left_bound = true};
  for (const ForwardConfig& config : kConfigs) codes.push_back(code_of(config, causal, DType::kBFloat16));
  for (const int index : {0, 2}) {  // of each value size the first
    for (const Features& features : {Features{}, window}) {
      codes.push_back(code_of(kConfigs[index], features, DType::kBFloat16));
    }
    codes.push_back(code_of(kConfigs[index], causal, DType::kFloat32));
    codes.push_back(code_of(kConfigs[index], causal, DType::kFloat16));
  }
  return codes;
}

}  // namespace

constinit const registry::Kernel<Forward> kSm90{.name = "sm90_wgmma",
                                                .origin = registry::Origin::kOurs,
                                                .supports = supports,
                                                .configs = configs,
                                                .heuristic = nullptr,
                                                .run = run,
                                                .source_hash = source_hash,
                                                .device_code = device_code};

}  // namespace kernel_pytorch::attention::fp8
