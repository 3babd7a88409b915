// The backward of attention on sm_90: three launches (attention_sm90_backward_cuda.h), scratch of O(queries * size).
#include <algorithm>

#include "kernel_pytorch/base/error.h"
#include "kernel_pytorch/device/cuda/driver.h"
#include "kernel_pytorch/device/cuda/tensor_map.h"
#include "kernel_pytorch/jit/jit.h"
#include "kernel_pytorch/ops/attention/attention_features.h"
#include "kernel_pytorch/ops/attention/attention_sm90_backward_cuda.h"
#include "kernel_pytorch/ops/attention/operation.h"

namespace kernel_pytorch::attention {
namespace {

constexpr const char* kMainSource = "kernel_pytorch/ops/attention/attention_sm90_backward_cuda.cuh";
constexpr const char* kRowsSource = "kernel_pytorch/ops/attention/attention_sm90_backward_rows_cuda.cuh";
constexpr int kPrepareThreads = 256;
constexpr int kFinishThreads = 128;

constexpr BackwardTile kTiles[] = {{64, 64, 128, 3, 2}, {96, 96, 64, 3, 3}, {128, 128, 64, 3, 3}};
constexpr DType kTypes[] = {DType::kBFloat16, DType::kFloat16};

int tile_index_of(const BackwardProblem& problem) {
  const int64_t columns = std::max(problem.query.size(3), problem.value.size(3));
  for (int i = 0; i < static_cast<int>(std::size(kTiles)); ++i) {
    if (columns <= kTiles[i].head) return i;
  }
  return -1;
}

std::string to_text(const BackwardTile& tile) {
  return concat("kernel_pytorch::attention::BackwardTile{", tile.head, ", ", tile.value, ", ", tile.queries, ", ",
                tile.stages, ", ", tile.score_stages, "}");
}
DeviceCode main_code(const Features& features, const BackwardTile& tile, DType dtype) {
  return {.source = kMainSource,
          .entry = concat("kernel_pytorch::attention::backward_keys<", element_type_name(dtype), ", ",
                          to_text(features), ", ", to_text(tile), ">"),
          .minimum_capability = 90,
          .architecture_specific = true};
}
DeviceCode prepare_code(const BackwardTile& tile, DType dtype, bool is_packed) {
  return {.source = kRowsSource,
          .entry = concat("kernel_pytorch::attention::backward_prepare<", element_type_name(dtype), ", ", tile.queries,
                          ", ", tile.value > 128 ? 2 : 1, ", ", bool_name(is_packed), ">"),
          .minimum_capability = 90};
}
DeviceCode finish_code(const BackwardTile& tile, DType dtype, bool is_packed) {
  return {.source = kRowsSource,
          .entry = concat("kernel_pytorch::attention::backward_finish<", element_type_name(dtype), ", ", tile.queries,
                          ", ", tile.head, ", ", bool_name(is_packed), ">"),
          .minimum_capability = 90};
}

unsigned shared_bytes_of(const BackwardTile& tile) {
  const int keys = tile_bytes(kBackwardKeys, tile.head) + tile_bytes(kBackwardKeys, tile.value);
  const int stage = tile_bytes(tile.queries, tile.head) + tile_bytes(tile.queries, tile.value) + 2 * tile.queries * 4;
  const int scores = tile.score_stages * tile_bytes(kBackwardKeys, tile.queries);
  return static_cast<unsigned>(keys + tile.stages * stage + scores + kBackwardSharedExtra);
}

// Sums, records and what else lives between the launches.
struct Scratches {
  float* records;
  float* sums;
  uint32_t* turns = nullptr;
};

struct Launcher {
  const BackwardProblem& problem;
  Context& context;
  const BackwardTile& tile;
  int tile_index;
  Features features;
  ScoreArguments score;
  QueryTiles tiles;
  Scratches scratch;

  uint32_t variant(int kernel) const {
    const uint32_t type = problem.query.dtype == DType::kFloat16 ? 1 : 0;
    return static_cast<uint32_t>(kernel * 16 + tile_index * 2) + type;
  }
  CUkern_st* kernel(int which) const {
    static FeatureKernels kernels;
    const bool is_packed = features.packed;
    const Features relevant = which == 1 ? features : Features{.packed = is_packed};
    return kernels.get(relevant, variant(which), context, [&] {
      const DType dtype = problem.query.dtype;
      return which == 0   ? prepare_code(tile, dtype, is_packed)
             : which == 1 ? main_code(features, tile, dtype)
                          : finish_code(tile, dtype, is_packed);
    });
  }

  void prepare() const {
    static const std::string kLabel = "attention_backward sm90 prepare";
    PrepareArguments arguments{.score = score,
                               .output = row_tensor_of(problem.output),
                               .grad_output = row_tensor_of(problem.grad_output),
                               .lse = problem.lse.as<const float>(),
                               .grad_lse = problem.grad_lse.is_present() ? problem.grad_lse.as<const float>() : nullptr,
                               .records = scratch.records,
                               .grad_query_sums = scratch.sums,
                               .sink_sums = nullptr,
                               .turns = scratch.turns,
                               .tiles = tiles,
                               .columns = static_cast<int32_t>(problem.value.size(3)),
                               .sum_columns = tile.head};
    void* pointers[] = {&arguments};
    cuda_device::LaunchShape shape;
    shape.grid_x = static_cast<unsigned>(tiles.tile_count);
    shape.block_x = kPrepareThreads;
    cuda_device::launch(context, kernel(0), shape, pointers, kLabel);
  }

  void main() const {
    static const std::string kLabel = "attention_backward sm90";
    BackwardArguments arguments{};
    arguments.score = score;
    arguments.grad_key = row_tensor_of(problem.grad_key);
    arguments.grad_value = row_tensor_of(problem.grad_value);
    arguments.records = scratch.records;
    arguments.grad_query_sums = scratch.sums;
    arguments.turns = scratch.turns;
    arguments.tiles = tiles;
    arguments.head_columns = static_cast<int32_t>(problem.query.size(3));
    arguments.value_columns = static_cast<int32_t>(problem.value.size(3));
    arguments.key_blocks = static_cast<int32_t>(features.packed ? score.key_tokens / kBackwardKeys + score.batches
                                                                : divide_up(problem.key.size(2), kBackwardKeys));
    cuda_device::encode_tensor_map(problem.query, 64, arguments.query.words);
    cuda_device::encode_tensor_map(problem.key, 64, arguments.key.words);
    cuda_device::encode_tensor_map(problem.value, 64, arguments.value.words);
    cuda_device::encode_tensor_map(problem.grad_output, 64, arguments.grad_output.words);
    void* pointers[] = {&arguments};
    cuda_device::LaunchShape shape;
    const int64_t heads = problem.key.size(1) * (features.packed ? 1 : problem.key.size(0));
    shape.grid_x = static_cast<unsigned>(arguments.key_blocks * heads);
    shape.block_x = kBackwardThreads;
    shape.shared_bytes = shared_bytes_of(tile);
    shape.programmatic_dependent = true;
    cuda_device::launch(context, kernel(1), shape, pointers, kLabel);
  }

  void finish() const {
    static const std::string kLabel = "attention_backward sm90 finish";
    FinishArguments arguments{.score = score,
                              .grad_query = row_tensor_of(problem.grad_query),
                              .grad_query_sums = scratch.sums,
                              .tiles = tiles,
                              .columns = static_cast<int32_t>(problem.query.size(3)),
                              .sum_columns = tile.head};
    void* pointers[] = {&arguments};
    cuda_device::LaunchShape shape;
    shape.grid_x = static_cast<unsigned>(tiles.tile_count * (tile.queries / 64));
    shape.block_x = kFinishThreads;
    shape.programmatic_dependent = true;
    cuda_device::launch(context, kernel(2), shape, pointers, kLabel);
  }
};

const char* obstacle_of(const BackwardProblem& problem, const DeviceInfo& device) {
  if (const char* obstacle = cuda_obstacle(problem.query.dtype, device)) return obstacle;
  if (device.cuda.capability() != 90) return "needs compute capability 9.0 (wgmma)";
  if (problem.query.dtype == DType::kFloat32) return "takes bf16 and fp16";
  if (tile_index_of(problem) < 0) return "head sizes above 128";
  if (problem.query.size(3) % 8 != 0 || problem.value.size(3) % 8 != 0) return "head sizes are no multiple of 8";
  const Features features = features_of(problem.scoring);
  const Features taken{.right_bound = features.right_bound, .left_bound = features.left_bound};
  if (bits_of(features) != bits_of(taken)) return "an option that this kernel does not have";
  if (problem.scoring.deterministic) return "sums grad_query in no fixed order";
  for (const TensorView* view : {&problem.query, &problem.key, &problem.value, &problem.grad_output, &problem.output,
                                 &problem.grad_query, &problem.grad_key, &problem.grad_value}) {
    if (const char* obstacle = cuda_device::tensor_map_obstacle(*view)) return obstacle;
  }
  return nullptr;
}

registry::Support supports(const BackwardProblem& problem, const DeviceInfo& device) {
  return registry::Support::unless(obstacle_of(problem, device));
}

void run(const BackwardProblem& problem, int, Context& context) {
  const int tile_index = tile_index_of(problem);
  const BackwardTile& tile = kTiles[tile_index];
  Launcher launcher{.problem = problem,
                    .context = context,
                    .tile = tile,
                    .tile_index = tile_index,
                    .features = features_of(problem.scoring),
                    .score = score_arguments_of(problem.scoring, problem.query, problem.key, context),
                    .tiles = {},
                    .scratch = {}};
  const ScoreArguments& score = launcher.score;
  const bool is_packed = launcher.features.packed;
  launcher.tiles.tiles = static_cast<int32_t>(is_packed ? score.query_tokens / tile.queries + score.batches
                                                        : divide_up(problem.query.size(2), tile.queries));
  launcher.tiles.tile_count = launcher.tiles.tiles * score.heads * (is_packed ? 1 : score.batches);
  const size_t rows = static_cast<size_t>(launcher.tiles.tile_count) * static_cast<size_t>(tile.queries);
  launcher.scratch.records = static_cast<float*>(context.scratch->allocate(rows * 2 * sizeof(float)));
  launcher.scratch.sums =
      static_cast<float*>(context.scratch->allocate(rows * static_cast<size_t>(tile.head) * sizeof(float)));
  if (launcher.tiles.tile_count > 0) launcher.prepare();
  if (problem.key.element_count() > 0) launcher.main();
  if (launcher.tiles.tile_count > 0) launcher.finish();
}

std::vector<DeviceCode> device_code() {
  std::vector<DeviceCode> codes;
  for (const BackwardTile& tile : kTiles) {
    for (DType dtype : kTypes) {
      codes.push_back(prepare_code(tile, dtype, false));
      codes.push_back(finish_code(tile, dtype, false));
      codes.push_back(main_code({}, tile, dtype));
      codes.push_back(main_code({.right_bound = true}, tile, dtype));
    }
  }
  return codes;
}

uint64_t source_hash() {
  return jit::source_hash(kMainSource) ^ jit::source_hash(kRowsSource);
}

}  // namespace

constinit const registry::Kernel<BackwardProblem> kBackwardSm90 = {.name = "sm90",
                                                                   .origin = registry::Origin::kOurs,
                                                                   .supports = supports,
                                                                   .configs = nullptr,
                                                                   .heuristic = nullptr,
                                                                   .run = run,
                                                                   .source_hash = source_hash,
                                                                   .device_code = device_code};

}  // namespace kernel_pytorch::attention
