// Host side of attention over latent rows on the GPU: "cuda" plans, attends and combines, as paged attention does;
// "cuda_rows" takes what it does not.
#include <algorithm>

#include "kernel_pytorch/ops/paged_attention/latent/latent_host.h"

namespace kernel_pytorch::paged_attention {
namespace {

constexpr const char* kSource = "kernel_pytorch/ops/paged_attention/latent/kernel.cuh";
constexpr const char* kRowsSource = "kernel_pytorch/ops/paged_attention/latent/rows.cuh";
constexpr const char* kOtherSizes = "takes latent rows of 512 columns and rope rows of 64";
constexpr const char* kUnevenPages = "takes indices where pages follow one another in the caches";
constexpr const char* kWideRows = "takes keys of up to 640 columns";
constexpr const char* kLittleShared =
    "needs more shared memory per block than this GPU has; compute capability 8.0, 9.0 and 10.0 have it";
constexpr int64_t kMostColumns = 640;
constexpr int32_t kLatentWarps = 8;

// Keys of a step and stages, for up to 16, 32 and more rows, of numbers and of codes.
struct Steps {
  int32_t keys, stages;
};
constexpr Steps kSteps[2][3][3] = {{{{32, 2}, {32, 4}, {64, 2}}, {{32, 4}, {32, 3}, {}}, {{32, 3}, {}, {}}},
                                   {{{32, 3}, {64, 4}, {64, 3}}, {{32, 3}, {64, 3}, {}}, {{32, 4}, {32, 3}, {}}}};

int row_choice(const Attend& problem) {
  const int64_t rows = most_queries(problem) * problem.query.sizes[1];
  return rows <= 16 ? 0 : rows <= 32 ? 1 : 2;
}
Tile tile_of(const Attend& problem, int config) {
  const int bytes = static_cast<int>(size_of(problem.key_cache.dtype)), choice = row_choice(problem);
  const Steps steps = kSteps[bytes == 1 ? 1 : 0][choice][config];
  return {.size = kLatentSize,
          .value_size = kLatentValueSize,
          .row_warps = 1 << choice,
          .keys = steps.keys,
          .stages = steps.stages,
          .bytes = bytes,
          .warps = kLatentWarps};
}

registry::Support supports(const Latent& problem, const DeviceInfo& device) {
  if (const char* obstacle = latent_obstacle(problem, device)) return registry::Support::no(obstacle);
  return registry::Support::unless(
      latent_shared_bytes(tile_of(attend_of(problem), 0)) > device.cuda.shared_bytes_per_block ? kLittleShared
                                                                                               : nullptr);
}

std::vector<std::string> configs(const Latent& problem, const DeviceInfo& device) {
  std::vector<std::string> texts;
  const Attend attend = attend_of(problem);
  for (int i = 0; i < 3; ++i) {
    const Tile tile = tile_of(attend, i);
    if (tile.keys > 0 && latent_shared_bytes(tile) <= device.cuda.shared_bytes_per_block) {
      texts.push_back(config_text(tile));
    }
  }
  return texts;
}

DeviceCode latent_code(DType dtype, DType cache, const Tile& tile) {
  return code_of("attend_latent",
                 concat(element_type_name(dtype), ", ", cache_type_name(cache), ", ", device_text(tile)), kSource,
                 tile.row_warps > 2 ? 90 : 80);  // 64 rows have no room before
}

void run(const Latent& problem, int config, Context& context) {
  static const std::string kPlanLabel = "mla_decode plan", kLabel = "mla_decode", kCombineLabel = "mla_decode combine";
  constexpr int kVariants = 2 * 2 * 3 * 3;
  static KernelTable<kVariants> plans, attends, combines;
  if (problem.query.sizes[0] * problem.query.sizes[1] == 0) return;
  const Attend attend = attend_of(problem);
  const Tile tile = tile_of(attend, config);
  const DType dtype = problem.query.dtype, cache = problem.latent_cache.dtype;
  const int variant =
      (((dtype == DType::kBFloat16 ? 0 : 1) * 2 + tile.bytes - 1) * 3 + row_choice(attend)) * 3 + config;
  WorkArguments work{.attend = latent_arguments(problem, attend)};
  const int64_t multiprocessors = std::max(context.info->cuda.multiprocessors, 1);
  const int64_t blocks = multiprocessors * latent_blocks(tile);
  set_workers(work, attend, tile, blocks, context);
  work.plan = static_cast<int64_t*>(
      context.scratch->allocate(static_cast<size_t>(attend.seq_lens.sizes[0] + 1) * sizeof(int64_t)));
  launch(context, plans.get(variant, context, [&] { return plan_code(tile); }), 1, 1024, 0, work, kPlanLabel);
  launch(context, attends.get(variant, context, [&] { return latent_code(dtype, cache, tile); }), blocks,
         32 * tile.warps, latent_shared_bytes(tile), work, kLabel);
  launch(context, combines.get(variant, context, [&] { return combine_code(dtype, tile); }), 2 * multiprocessors,
         kCombineThreads, 0, work, kCombineLabel, true);
}

DeviceCode rows_code(DType dtype, DType cache) {
  return code_of("attend_latent_rows", concat(element_type_name(dtype), ", ", cache_type_name(cache)), kRowsSource,
                 float8_capability(cache));
}

registry::Support supports_rows(const Latent& problem, const DeviceInfo& device) {
  if (const char* obstacle = cuda_obstacle(problem.query.dtype, device)) return registry::Support::no(obstacle);
  if (problem.query.sizes[2] > kMostColumns) return registry::Support::no(kWideRows);
  if (problem.indices.is_present() && !has_even_pages(problem)) return registry::Support::no(kUnevenPages);
  if (const char* missing = cache_type_obstacle(problem.latent_cache.dtype, device)) {
    return registry::Support::no(missing);
  }
  return registry::Support::unless(size_obstacle(attend_of(problem)));
}

void run_rows(const Latent& problem, int, Context& context) {
  static const std::string kLabel = "mla_decode rows";
  static KernelTable<3 * 2> table;
  const int64_t rows = problem.query.sizes[0] * problem.query.sizes[1];
  if (rows == 0) return;
  const DType dtype = problem.query.dtype, cache = problem.latent_cache.dtype;
  AttendArguments arguments = latent_arguments(problem, attend_of(problem));
  CUkern_st* kernel = table.get(cuda_type_index(dtype) * 2 + (cache == DType::kFloat8E4M3 ? 1 : 0), context,
                                [&] { return rows_code(dtype, cache); });
  launch(context, kernel, rows, kThreads, 0, arguments, kLabel);
}

uint64_t source_hash() {
  return jit::source_hash(kSource);
}
uint64_t rows_hash() {
  return jit::source_hash(kRowsSource);
}

std::vector<DeviceCode> device_code() {
  std::vector<DeviceCode> codes;
  for (const DType cache : {DType::kBFloat16, DType::kFloat8E4M3}) {
    const int bytes = static_cast<int>(size_of(cache));
    for (int choice = 0; choice < 3; ++choice) {
      for (const Steps& steps : kSteps[bytes == 1 ? 1 : 0][choice]) {
        if (steps.keys == 0) continue;
        const Tile tile{.size = kLatentSize,
                        .value_size = kLatentValueSize,
                        .row_warps = 1 << choice,
                        .keys = steps.keys,
                        .stages = steps.stages,
                        .bytes = bytes,
                        .warps = kLatentWarps};
        codes.push_back(latent_code(DType::kBFloat16, cache, tile));
        if (&steps == kSteps[bytes == 1 ? 1 : 0][choice]) codes.push_back(combine_code(DType::kBFloat16, tile));
      }
    }
  }
  return codes;
}
std::vector<DeviceCode> rows_device_code() {
  return {rows_code(DType::kFloat32, DType::kFloat32), rows_code(DType::kBFloat16, DType::kFloat8E4M3)};
}

}  // namespace

const char* latent_obstacle(const Latent& problem, const DeviceInfo& device) {
  if (const char* obstacle = tensor_core_obstacle(attend_of(problem), device)) return obstacle;
  if (problem.latent_cache.sizes[2] != kLatentValueSize || problem.query.sizes[2] != kLatentSize) return kOtherSizes;
  return problem.indices.is_present() && !has_even_pages(problem) ? kUnevenPages : nullptr;
}

AttendArguments latent_arguments(const Latent& problem, const Attend& attend) {
  AttendArguments arguments = attend_arguments(attend);
  arguments.value_size = static_cast<int32_t>(problem.latent_cache.sizes[2]);
  if (attend.key_scale.is_present()) {
    arguments.key.scale_page_stride = attend.key_scale.strides[0];
    arguments.key.scale_row_stride = attend.key_scale.strides[1];
    arguments.key.scale_head_stride = attend.key_scale.strides[2];
  }
  return arguments;
}

constinit const registry::Kernel<Latent> kLatentCuda{.name = "cuda",
                                                     .supports = supports,
                                                     .configs = configs,
                                                     .run = run,
                                                     .source_hash = source_hash,
                                                     .device_code = device_code};
constinit const registry::Kernel<Latent> kLatentCudaRows{.name = "cuda_rows",
                                                         .supports = supports_rows,
                                                         .run = run_rows,
                                                         .source_hash = rows_hash,
                                                         .device_code = rows_device_code,
                                                         .is_fallback = true};

}  // namespace kernel_pytorch::paged_attention
