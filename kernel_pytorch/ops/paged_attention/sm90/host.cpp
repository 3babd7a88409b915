// Host side of paged attention on Hopper: one launch that attends, by blocks of several key heads, and one that
// combines what was cut. Blocks plan for themselves, so nothing precedes them.
#include <algorithm>

#include "kernel_pytorch/ops/paged_attention/cuda/attend_host.h"

namespace kernel_pytorch::paged_attention {
namespace {

constexpr const char* kSource = "kernel_pytorch/ops/paged_attention/sm90/kernel.cuh";
constexpr const char* kLargeHeads = "takes heads of up to 192 columns, 128 of values";

constexpr int32_t kShortestRun = 512;  // bytes that are worth a copy of their own
constexpr int64_t kStaticBytes = 512;  // at most, of shared memory that the compiler lays out

struct Sizes {
  int32_t size, value_size;
};
constexpr Sizes kSizes[] = {{64, 64}, {96, 96}, {128, 128}, {192, 128}};

// How a block is made up: warps that multiply, key heads, and keys of a warp in a step. Twelve warps have registers for
// eight rows each.
struct Shape {
  int32_t warps, heads, warp_keys;
};
constexpr Shape kShapes[] = {{8, 8, 16}, {8, 8, 32}, {8, 4, 16},  {8, 4, 32},  {8, 2, 16}, {8, 2, 32},
                             {8, 1, 16}, {8, 1, 32}, {12, 4, 16}, {12, 2, 16}, {12, 1, 16}};
// Rows of a warp and warps of rows, for the most rows that a request has.
struct Rows {
  int32_t rows, row_warps;
};
constexpr Rows kRows[] = {{8, 1}, {16, 1}, {16, 2}, {16, 4}};
constexpr int kSizeCount = std::size(kSizes), kShapeCount = std::size(kShapes), kRowChoices = std::size(kRows);

int size_index(const Attend& problem) {
  for (int i = 0; i < kSizeCount; ++i) {
    if (kSizes[i].size >= problem.query.sizes[2] && kSizes[i].value_size >= problem.value_cache.sizes[3]) return i;
  }
  return -1;
}
int row_choice(const Attend& problem) {
  const int64_t rows = most_queries(problem) * group_of(problem);
  int choice = 0;
  while (choice + 1 < kRowChoices && kRows[choice].rows * kRows[choice].row_warps < rows) ++choice;
  return choice;
}

// The tile of a shape with as many stages as fit; of none where two do not.
Tile tile_of(const Attend& problem, const Shape& shape, int64_t shared) {
  const Sizes sizes = kSizes[size_index(problem)];
  const Rows rows = kRows[row_choice(problem)];
  Tile tile{.size = sizes.size,
            .value_size = sizes.value_size,
            .row_warps = rows.row_warps,
            .bytes = static_cast<int32_t>(size_of(problem.key_cache.dtype)),
            .heads = shape.heads,
            .warps = shape.warps,
            .rows = rows.rows};
  if (shape.warps > 8 && (tile.row_warps > 1 || tile.rows > 8 || tile.size > 128)) return {};
  if (shape.heads * tile.row_warps > shape.warps || problem.key_cache.sizes[2] % shape.heads != 0) return {};
  tile.keys = shape.warp_keys * slice_count(tile);
  if (tile.keys > 256 || heads_result_bytes(tile) > heads_stage_bytes(tile)) return {};
  for (tile.stages = kMostStages; tile.stages >= 2; --tile.stages) {
    if (heads_shared_bytes(tile) <= shared - kStaticBytes) return tile;
  }
  return {};
}
std::vector<int> shapes_of(const Attend& problem, const DeviceInfo& device) {
  std::vector<int> shapes;
  for (int i = 0; i < kShapeCount; ++i) {
    if (tile_of(problem, kShapes[i], device.cuda.shared_bytes_per_block).stages > 0) shapes.push_back(i);
  }
  return shapes;
}

// Whether rows of a key's heads stand one after another, in whole.
bool has_runs(const Attend& problem, const Tile& tile) {
  const auto is_run = [&](const TensorView& cache, const TensorView& scale, int32_t size) {
    const ScaleStrides strides = scale_strides(scale);
    return cache.sizes[3] == size && (tile.heads == 1 || cache.strides[2] == size) && strides.page == 0 &&
           strides.row == 0;
  };
  return tile.heads * tile.size * tile.bytes >= kShortestRun &&
         is_run(problem.key_cache, problem.key_scale, tile.size) &&
         is_run(problem.value_cache, problem.value_scale, tile.value_size);
}

registry::Support supports(const Attend& problem, const DeviceInfo& device) {
  if (const char* obstacle = tensor_core_obstacle(problem, device)) return registry::Support::no(obstacle);
  if (const char* missing = feature_obstacle(device, CudaFeature::kWgmma)) return registry::Support::no(missing);
  return registry::Support::unless(size_index(problem) < 0 ? kLargeHeads : nullptr);
}

std::vector<std::string> configs(const Attend& problem, const DeviceInfo& device) {
  std::vector<std::string> texts;
  for (const int i : shapes_of(problem, device)) {
    texts.push_back(config_text(tile_of(problem, kShapes[i], device.cuda.shared_bytes_per_block)));
  }
  return texts;
}

// As measured (NOTES.md): as many heads as there are with long steps for codes, which are half as long, and where warps
// share keys; four heads and twelve warps for few rows of numbers.
int heuristic(const Attend& problem, const DeviceInfo& device) {
  const std::vector<int> shapes = shapes_of(problem, device);
  const bool is_code = problem.key_cache.dtype == DType::kFloat8E4M3;
  const bool wants_long = is_code || kRows[row_choice(problem)].row_warps > 1;
  const auto worth = [&](int i) {
    const Shape& shape = kShapes[shapes[static_cast<size_t>(i)]];
    if (shape.warps > 8) return !is_code && shape.heads == 4 ? 100 : 0;
    return 2 * shape.heads + ((shape.warp_keys == 32) == wants_long ? 1 : 0);
  };
  int best = 0;
  for (int i = 1; i < static_cast<int>(shapes.size()); ++i) {
    if (worth(i) > worth(best)) best = i;
  }
  return best;
}

DeviceCode attend_code(DType dtype, DType cache, const Tile& tile) {
  return code_of("attend_heads",
                 concat(element_type_name(dtype), ", ", cache_type_name(cache), ", ", device_text(tile)), kSource, 90,
                 true);
}

void run(const Attend& problem, int config, Context& context) {
  static const std::string kPlanLabel = "paged_attention plan", kLabel = "paged_attention",
                           kCombineLabel = "paged_attention combine";
  constexpr int kVariants = kSizeCount * kRowChoices * kShapeCount * 4;
  static KernelTable<kVariants> plans, attends, combines;
  if (problem.output.element_count() == 0 && !problem.lse.is_present()) return;
  if (problem.query.sizes[0] * problem.query.sizes[1] == 0) return;
  const int64_t shared = context.info->cuda.shared_bytes_per_block;
  const int shape = shapes_of(problem, *context.info)[static_cast<size_t>(config)];
  const Tile tile = tile_of(problem, kShapes[shape], shared);
  const DType dtype = problem.query.dtype;
  const int variant =
      (((size_index(problem) * kRowChoices + row_choice(problem)) * kShapeCount + shape) * 2 + tile.bytes - 1) * 2 +
      (dtype == DType::kBFloat16 ? 0 : 1);
  WorkArguments work{.attend = attend_arguments(problem)};
  const int64_t multiprocessors = std::max(context.info->cuda.multiprocessors, 1);
  set_workers(work, problem, tile, multiprocessors, context);
  work.has_runs = has_runs(problem, tile);
  const int64_t requests = problem.seq_lens.sizes[0];
  if (requests > kSharedRequests) {
    work.plan = static_cast<int64_t*>(context.scratch->allocate(static_cast<size_t>(requests + 1) * sizeof(int64_t)));
    launch(context, plans.get(variant, context, [&] { return plan_code(tile); }), 1, 1024, 0, work, kPlanLabel);
  }
  launch(context, attends.get(variant, context, [&] { return attend_code(dtype, problem.key_cache.dtype, tile); }),
         multiprocessors, 32 * (tile.warps + kCopyWarps), heads_shared_bytes(tile), work, kLabel, true);
  launch(context, combines.get(variant, context, [&] { return combine_code(dtype, tile); }), 2 * multiprocessors,
         kCombineThreads, 0, work, kCombineLabel, true);
}

uint64_t source_hash() {
  return jit::source_hash(kSource);
}

std::vector<DeviceCode> device_code() {
  std::vector<DeviceCode> codes;
  // size, value_size, row_warps, keys, stages, bytes, heads, warps, rows
  constexpr Tile kBuilt[] = {
      {64, 64, 1, 16, 6, 2, 8, 8, 8},    {96, 96, 1, 16, 4, 2, 8, 8, 16},    {128, 128, 1, 16, 3, 2, 8, 8, 8},
      {128, 128, 1, 48, 2, 2, 4, 12, 8}, {128, 128, 1, 128, 3, 2, 1, 8, 8},  {128, 128, 1, 16, 3, 2, 8, 8, 16},
      {128, 128, 2, 32, 3, 2, 4, 8, 16}, {128, 128, 4, 32, 6, 2, 2, 8, 16},  {192, 128, 1, 16, 2, 2, 8, 8, 16},
      {128, 128, 1, 32, 3, 1, 8, 8, 8},  {128, 128, 1, 256, 2, 1, 1, 8, 16}, {128, 128, 2, 32, 6, 1, 4, 8, 16},
  };
  for (const Tile& tile : kBuilt) {
    codes.push_back(attend_code(DType::kBFloat16, tile.bytes == 1 ? DType::kFloat8E4M3 : DType::kBFloat16, tile));
    codes.push_back(combine_code(DType::kBFloat16, tile));
  }
  return codes;
}

}  // namespace

constinit const registry::Kernel<Attend> kAttendSm90{.name = "sm90",
                                                     .supports = supports,
                                                     .configs = configs,
                                                     .heuristic = heuristic,
                                                     .run = run,
                                                     .source_hash = source_hash,
                                                     .device_code = device_code};

}  // namespace kernel_pytorch::paged_attention
