// Host side of paged attention on the GPU. "cuda" plans, attends and combines: three launches whose shapes depend on
// the shapes of the arguments alone, never on lengths. "cuda_rows" takes what it does not.
#include <algorithm>

#include "kernel_pytorch/ops/paged_attention/cuda/attend_host.h"

namespace kernel_pytorch::paged_attention {

namespace {

constexpr const char* kSource = "kernel_pytorch/ops/paged_attention/cuda/kernel.cuh";
constexpr const char* kRowsSource = "kernel_pytorch/ops/paged_attention/cuda/rows.cuh";
constexpr const char* kAppendSource = "kernel_pytorch/ops/paged_attention/cuda/append.cuh";
constexpr const char* kLargeHeads = "takes heads of up to 256 columns";
constexpr const char* kSmallBlocks =
    "keys and values of two steps are more than a block's shared memory on this device";
constexpr const char* kVeryLargeHeads = "takes heads of up to 512 columns";

// About 100 KB of keys and values under way: two blocks on a multiprocessor.
constexpr Tile kTiles[] = {
    {.size = 64, .value_size = 64, .row_warps = 1, .keys = 64, .stages = 5, .bytes = 2},
    {.size = 96, .value_size = 96, .row_warps = 1, .keys = 64, .stages = 4, .bytes = 2},
    {.size = 128, .value_size = 128, .row_warps = 1, .keys = 64, .stages = 3, .bytes = 2},
    {.size = 192, .value_size = 128, .row_warps = 1, .keys = 64, .stages = 2, .bytes = 2},
    {.size = 256, .value_size = 256, .row_warps = 1, .keys = 64, .stages = 2, .bytes = 2},
    {.size = 64, .value_size = 64, .row_warps = 1, .keys = 64, .stages = 4, .bytes = 1},
    {.size = 128, .value_size = 128, .row_warps = 1, .keys = 64, .stages = 3, .bytes = 1},
    {.size = 192, .value_size = 128, .row_warps = 1, .keys = 64, .stages = 4, .bytes = 1},
    {.size = 256, .value_size = 256, .row_warps = 1, .keys = 64, .stages = 2, .bytes = 1},
};
constexpr int kTileCount = std::size(kTiles), kRowWarpChoices = 3;

int tile_index(const Attend& problem) {
  for (int i = 0; i < kTileCount; ++i) {
    if (kTiles[i].bytes == size_of(problem.key_cache.dtype) && kTiles[i].size >= problem.query.sizes[2] &&
        kTiles[i].value_size >= problem.value_cache.sizes[3]) {
      return i;
    }
  }
  return -1;
}

// 1, 2 or 4 warps with 16 rows each, as many as the largest request has.
int row_warp_choice(const Attend& problem) {
  const int64_t rows = most_queries(problem) * group_of(problem);
  return rows <= 16 ? 0 : rows <= 32 ? 1 : 2;
}
// With as many stages, of two at least, as the device's blocks hold.
Tile tile_of(const Attend& problem, const DeviceInfo& device) {
  Tile tile = kTiles[tile_index(problem)];
  tile.row_warps = 1 << row_warp_choice(problem);
  while (tile.stages > 2 && shared_bytes(tile) > device.cuda.shared_bytes_per_block) --tile.stages;
  return tile;
}

registry::Support supports(const Attend& problem, const DeviceInfo& device) {
  if (const char* obstacle = tensor_core_obstacle(problem, device)) return registry::Support::no(obstacle);
  if (tile_index(problem) < 0) return registry::Support::no(kLargeHeads);
  const bool fits = shared_bytes(tile_of(problem, device)) <= device.cuda.shared_bytes_per_block;
  return registry::Support::unless(fits ? nullptr : kSmallBlocks);
}

registry::Support supports_rows(const Attend& problem, const DeviceInfo& device) {
  if (const char* obstacle = cuda_obstacle(problem.query.dtype, device)) return registry::Support::no(obstacle);
  if (std::max(problem.query.sizes[2], problem.value_cache.sizes[3]) > 512) {
    return registry::Support::no(kVeryLargeHeads);
  }
  if (const char* missing = cache_type_obstacle(problem.key_cache.dtype, device)) return registry::Support::no(missing);
  return registry::Support::unless(size_obstacle(problem));
}

DeviceCode attend_code(DType dtype, DType cache, const Tile& tile) {
  return code_of("attend", concat(element_type_name(dtype), ", ", cache_type_name(cache), ", ", device_text(tile)),
                 kSource);
}
void run(const Attend& problem, int, Context& context) {
  static const std::string kPlanLabel = "paged_attention plan", kLabel = "paged_attention",
                           kCombineLabel = "paged_attention combine";
  constexpr int kVariants = kTileCount * kRowWarpChoices;
  static KernelTable<kVariants> plans;
  static KernelTable<kVariants * 2> attends, combines;
  if (problem.output.element_count() == 0 && !problem.lse.is_present()) return;
  if (problem.query.sizes[0] * problem.query.sizes[1] == 0) return;
  const Tile tile = tile_of(problem, *context.info);
  const int variant = tile_index(problem) * kRowWarpChoices + row_warp_choice(problem);
  const DType dtype = problem.query.dtype;
  const int of_type = variant * 2 + (dtype == DType::kBFloat16 ? 0 : 1);
  WorkArguments work{.attend = attend_arguments(problem)};
  const int64_t multiprocessors = std::max(context.info->cuda.multiprocessors, 1);
  const int64_t per_processor =
      std::clamp<int64_t>(context.info->cuda.shared_bytes_per_block / shared_bytes(tile), 1, 3);
  const int64_t blocks = multiprocessors * per_processor;
  set_workers(work, problem, tile, blocks, context);
  work.plan = static_cast<int64_t*>(
      context.scratch->allocate(static_cast<size_t>(problem.seq_lens.sizes[0] + 1) * sizeof(int64_t)));
  launch(context, plans.get(variant, context, [&] { return plan_code(tile); }), 1, 1024, 0, work, kPlanLabel);
  launch(context, attends.get(of_type, context, [&] { return attend_code(dtype, problem.key_cache.dtype, tile); }),
         blocks, kThreads, shared_bytes(tile), work, kLabel);
  launch(context, combines.get(of_type, context, [&] { return combine_code(dtype, tile); }), blocks, kCombineThreads, 0,
         work, kCombineLabel);
}

// Columns of a lane of the kernel without tensor cores: 2, 4, 8 or 16.
constexpr int kColumnChoices[] = {2, 4, 8, 16};
constexpr DType kRowTypes[] = {DType::kFloat32, DType::kBFloat16, DType::kFloat16};
DeviceCode rows_code(DType dtype, DType cache, int columns) {
  return code_of("attend_rows", concat(element_type_name(dtype), ", ", cache_type_name(cache), ", ", columns),
                 kRowsSource, float8_capability(cache));
}
// Of a cache: 0 for the query's type, 1 for e4m3, 2 for int8.
int cache_index(DType cache) {
  return cache == DType::kFloat8E4M3 ? 1 : cache == DType::kInt8 ? 2 : 0;
}

void run_rows(const Attend& problem, int, Context& context) {
  static const std::string kLabel = "paged_attention rows";
  static KernelTable<3 * 3 * 4> table;
  const int64_t rows = problem.query.sizes[0] * problem.query.sizes[1];
  if (rows == 0) return;
  const int64_t size = std::max(problem.query.sizes[2], problem.value_cache.sizes[3]);
  int choice = 0;
  while (kColumnChoices[choice] * 32 < size) ++choice;
  const DType dtype = problem.query.dtype, cache = problem.key_cache.dtype;
  AttendArguments arguments = attend_arguments(problem);
  CUkern_st* kernel = table.get((cuda_type_index(dtype) * 3 + cache_index(cache)) * 4 + choice, context,
                                [&] { return rows_code(dtype, cache, kColumnChoices[choice]); });
  launch(context, kernel, rows, kThreads, 0, arguments, kLabel);
}

std::vector<std::string> configs(const Attend& problem, const DeviceInfo& device) {
  return {config_text(tile_of(problem, device))};
}

uint64_t source_hash() {
  return jit::source_hash(kSource);
}
uint64_t rows_hash() {
  return jit::source_hash(kRowsSource);
}

std::vector<DeviceCode> device_code() {
  std::vector<DeviceCode> codes;
  for (Tile tile : kTiles) {
    const DType cache = tile.bytes == 1 ? DType::kFloat8E4M3 : DType::kBFloat16;
    codes.push_back(attend_code(DType::kBFloat16, cache, tile));
    if (tile.size != 128) continue;
    codes.push_back(attend_code(DType::kFloat16, tile.bytes == 1 ? cache : DType::kFloat16, tile));
    for (int row_warps : {2, 4}) {
      tile.row_warps = row_warps;
      codes.push_back(attend_code(DType::kBFloat16, cache, tile));
    }
    codes.push_back(plan_code(tile));
    codes.push_back(combine_code(DType::kBFloat16, tile));
  }
  return codes;
}
std::vector<DeviceCode> rows_device_code() {
  return {rows_code(DType::kFloat32, DType::kFloat32, 4), rows_code(DType::kFloat32, DType::kFloat8E4M3, 4),
          rows_code(DType::kBFloat16, DType::kInt8, 16)};
}

DeviceCode append_code(DType dtype, DType cache) {
  return code_of("append", concat(element_type_name(dtype), ", ", cache_type_name(cache)), kAppendSource,
                 float8_capability(cache));
}

registry::Support supports_append(const Append& problem, const DeviceInfo& device) {
  if (const char* obstacle = cuda_obstacle(problem.key.dtype, device)) return registry::Support::no(obstacle);
  return registry::Support::unless(cache_type_obstacle(problem.key_cache.dtype, device));
}

RotationArguments rotation_arguments(const Append& problem) {
  if (!problem.cos.is_present()) return {};
  const Rotation rotation = rotation_of(problem);
  const TensorView& positions = problem.positions;
  return {.cos = problem.cos.data,
          .sin = problem.sin.data,
          .positions = positions.is_present() ? positions.data : nullptr,
          .cos_stride = problem.cos.strides[0],
          .sin_stride = problem.sin.strides[0],
          .rows = problem.cos.sizes[0],
          .pairs = static_cast<int32_t>(rotation.pairs),
          .cos_step = static_cast<int32_t>(rotation.step * problem.cos.strides[1]),
          .sin_step = static_cast<int32_t>(rotation.step * problem.sin.strides[1]),
          .is_float = problem.cos.dtype == DType::kFloat32,
          .interleaved = problem.interleaved,
          .positions_are_wide = positions.is_present() && positions.dtype == DType::kInt64};
}

void run_append(const Append& problem, int, Context& context) {
  static const std::string kLabel = "append_kv";
  static KernelTable<9> table;
  const int64_t tokens = problem.key.sizes[0], heads = problem.key_cache.sizes[2];
  const int64_t blocks = divide_up(tokens * heads * 2, kWarps);
  if (blocks == 0) return;
  KP_CHECK(blocks < int64_t{1} << 31, "append_kv: key has ", tokens, " tokens; that many need two calls");
  const auto rows_of = [](const TensorView& rows) {
    return RowsArguments{rows.data, rows.strides[0], rows.strides[1], static_cast<int32_t>(rows.sizes[2])};
  };
  AppendArguments arguments{.new_key = rows_of(problem.key),
                            .new_value = rows_of(problem.value),
                            .key = cache_arguments(problem.key_cache, problem.key_scale),
                            .value = cache_arguments(problem.value_cache, problem.value_scale),
                            .rotation = rotation_arguments(problem),
                            .slots = problem.slots.data,
                            .tokens = tokens,
                            .key_heads = heads,
                            .page_size = problem.key_cache.sizes[1],
                            .slot_count = problem.key_cache.sizes[0] * problem.key_cache.sizes[1],
                            .slots_are_wide = problem.slots.dtype == DType::kInt64};
  const DType dtype = problem.key.dtype, cache = problem.key_cache.dtype;
  CUkern_st* kernel =
      table.get(cuda_type_index(dtype) * 3 + cache_index(cache), context, [&] { return append_code(dtype, cache); });
  launch(context, kernel, blocks, kThreads, 0, arguments, kLabel);
}

uint64_t append_hash() {
  return jit::source_hash(kAppendSource);
}
std::vector<DeviceCode> append_device_code() {
  std::vector<DeviceCode> codes;
  for (DType dtype : kRowTypes) {
    for (DType cache : {dtype, DType::kFloat8E4M3, DType::kInt8}) codes.push_back(append_code(dtype, cache));
  }
  return codes;
}

}  // namespace

constinit const registry::Kernel<Attend> kAttendCuda{.name = "cuda",
                                                     .supports = supports,
                                                     .configs = configs,
                                                     .run = run,
                                                     .source_hash = source_hash,
                                                     .device_code = device_code};
constinit const registry::Kernel<Attend> kAttendCudaRows{.name = "cuda_rows",
                                                         .supports = supports_rows,
                                                         .run = run_rows,
                                                         .source_hash = rows_hash,
                                                         .device_code = rows_device_code,
                                                         .is_fallback = true};
constinit const registry::Kernel<Append> kAppendCuda{.name = "cuda",
                                                     .supports = supports_append,
                                                     .run = run_append,
                                                     .source_hash = append_hash,
                                                     .device_code = append_device_code};

}  // namespace kernel_pytorch::paged_attention
