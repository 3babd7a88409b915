// Host side of paged attention on the GPU. "cuda" plans, attends and combines: three launches whose shapes depend on
// the shapes of the arguments alone, never on lengths. "cuda_rows" takes what it does not.
#include <algorithm>
#include <cmath>

#include "kernel_pytorch/base/config_fields.h"
#include "kernel_pytorch/base/error.h"
#include "kernel_pytorch/device/cuda/driver.h"
#include "kernel_pytorch/jit/jit.h"
#include "kernel_pytorch/ops/paged_attention/cuda/arguments_cuda.h"
#include "kernel_pytorch/ops/paged_attention/operation.h"
#include "kernel_pytorch/ops/support/cuda_support.h"

namespace kernel_pytorch::paged_attention {

inline constexpr auto kTileFields = config_fields<Tile>(config_field<&Tile::size>(), config_field<&Tile::value_size>(),
                                                        config_field<&Tile::row_warps>(), config_field<&Tile::keys>(),
                                                        config_field<&Tile::stages>(), config_field<&Tile::bytes>());
constexpr ConfigFields fields_of(const Tile&) {
  return kTileFields;
}

namespace {

constexpr const char* kSource = "kernel_pytorch/ops/paged_attention/cuda/kernel.cuh";
constexpr const char* kWorkSource = "kernel_pytorch/ops/paged_attention/cuda/work.cuh";
constexpr const char* kCombineSource = "kernel_pytorch/ops/paged_attention/cuda/combine.cuh";
constexpr const char* kRowsSource = "kernel_pytorch/ops/paged_attention/cuda/rows.cuh";
constexpr const char* kAppendSource = "kernel_pytorch/ops/paged_attention/cuda/append.cuh";
constexpr const char* kOtherTypes = "takes bf16 and fp16 with caches of that type or e4m3";
constexpr const char* kLargeHeads = "takes heads of up to 256 columns";
constexpr const char* kUnaligned = "rows of the caches must begin at multiples of 16 bytes";
constexpr const char* kManyKeys = "takes tables that name up to 2^30 keys, and up to 2^31 rows";
constexpr const char* kNeedsFloat8 = "converts to and from e4m3, which needs compute capability 8.9 or newer";
constexpr const char* kVeryLargeHeads = "takes heads of up to 512 columns";
constexpr int64_t kUnbounded = int64_t{1} << 30;
constexpr int64_t kInvariantKeys = 2048;  // of a piece, whatever the batch
constexpr int64_t kInvariantPieces = 32;  // at most, of a request
constexpr int kInvariantWorkersPerProcessor = 4;

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

int64_t group_of(const Attend& problem) {
  return problem.query.sizes[1] / std::max<int64_t>(problem.key_cache.sizes[2], 1);
}
int64_t most_queries(const Attend& problem) {
  const int64_t tokens = problem.query.sizes[0], requests = std::max<int64_t>(problem.seq_lens.sizes[0], 1);
  if (!problem.cu_seqlens_q.is_present()) return tokens / requests;
  return problem.max_seqlen_q > 0 ? std::min(problem.max_seqlen_q, tokens) : tokens;
}
// 1, 2 or 4 warps with 16 rows each, as many as the largest request has.
int row_warp_choice(const Attend& problem) {
  const int64_t rows = most_queries(problem) * group_of(problem);
  return rows <= 16 ? 0 : rows <= 32 ? 1 : 2;
}
Tile tile_of(const Attend& problem) {
  Tile tile = kTiles[tile_index(problem)];
  tile.row_warps = 1 << row_warp_choice(problem);
  return tile;
}

bool has_aligned_pages(const TensorView& cache) {
  const int64_t bytes = size_of(cache.dtype);
  if (reinterpret_cast<uintptr_t>(cache.data) % 16 != 0) return false;
  for (int i = 0; i < 3; ++i) {
    if (cache.sizes[i] > 1 && cache.strides[i] * bytes % 16 != 0) return false;
  }
  return true;
}

const char* size_obstacle(const Attend& problem) {
  const bool has_many = problem.block_tables.sizes[1] * problem.key_cache.sizes[1] >= kUnbounded ||
                        problem.query.sizes[0] * problem.query.sizes[1] >= int64_t{1} << 31;
  return has_many ? kManyKeys : nullptr;
}

registry::Support supports(const Attend& problem, const DeviceInfo& device) {
  if (const char* obstacle = cuda_obstacle(problem.query.dtype, device)) return registry::Support::no(obstacle);
  const bool is_half = problem.query.dtype != DType::kFloat32;
  const DType cache = problem.key_cache.dtype;
  if (!is_half || (cache != problem.query.dtype && cache != DType::kFloat8E4M3)) {
    return registry::Support::no(kOtherTypes);
  }
  if (tile_index(problem) < 0) return registry::Support::no(kLargeHeads);
  if (!has_aligned_pages(problem.key_cache) || !has_aligned_pages(problem.value_cache)) {
    return registry::Support::no(kUnaligned);
  }
  return registry::Support::unless(size_obstacle(problem));
}

int float8_capability(DType cache) {
  return cache == DType::kFloat8E4M3 ? 89 : 80;
}

registry::Support supports_rows(const Attend& problem, const DeviceInfo& device) {
  if (const char* obstacle = cuda_obstacle(problem.query.dtype, device)) return registry::Support::no(obstacle);
  if (std::max(problem.query.sizes[2], problem.value_cache.sizes[3]) > 512) {
    return registry::Support::no(kVeryLargeHeads);
  }
  if (float8_capability(problem.key_cache.dtype) > device.cuda.capability()) return registry::Support::no(kNeedsFloat8);
  return registry::Support::unless(size_obstacle(problem));
}

CacheArguments cache_arguments(const TensorView& cache, const TensorView& scale) {
  const ScaleStrides strides = scale_strides(scale);
  return {.data = cache.data,
          .page_stride = cache.strides[0],
          .row_stride = cache.strides[1],
          .head_stride = cache.strides[2],
          .scales = scale.is_present() ? scale.as<const float>() : nullptr,
          .scale_page_stride = strides.page,
          .scale_row_stride = strides.row,
          .scale_head_stride = strides.head};
}

int32_t window_of(int64_t side) {
  return static_cast<int32_t>(side < 0 ? kUnbounded : std::min(side, kUnbounded));
}

AttendArguments attend_arguments(const Attend& problem) {
  const int64_t requests = problem.seq_lens.sizes[0], tokens = problem.query.sizes[0];
  const auto narrow = [](int64_t value) { return static_cast<int32_t>(value); };
  const double size = std::max<double>(static_cast<double>(problem.query.sizes[2]), 1);
  AttendArguments arguments{
      .query = problem.query.data,
      .query_token_stride = problem.query.strides[0],
      .query_head_stride = problem.query.strides[1],
      .key = cache_arguments(problem.key_cache, problem.key_scale),
      .value = cache_arguments(problem.value_cache, problem.value_scale),
      .block_tables = problem.block_tables.as<const int32_t>(),
      .seq_lens = problem.seq_lens.as<const int32_t>(),
      .cu_seqlens_q = problem.cu_seqlens_q.is_present() ? problem.cu_seqlens_q.as<const int32_t>() : nullptr,
      .mask = problem.mask.is_present() ? problem.mask.as<const uint8_t>() : nullptr,
      .mask_request_stride = problem.mask.is_present() ? problem.mask.strides[0] : 0,
      .mask_query_stride = problem.mask.is_present() ? problem.mask.strides[1] : 0,
      .mask_key_stride = problem.mask.is_present() ? problem.mask.strides[2] : 0,
      .sinks = problem.sinks.is_present() ? problem.sinks.as<const float>() : nullptr,
      .alibi_slopes = problem.alibi_slopes.is_present() ? problem.alibi_slopes.as<const float>() : nullptr,
      .output = problem.output.data,
      .output_token_stride = problem.output.strides[0],
      .output_head_stride = problem.output.strides[1],
      .lse = problem.lse.is_present() ? problem.lse.as<float>() : nullptr,
      .scale = static_cast<float>(problem.scale.value_or(1 / std::sqrt(size))),
      .softcap = static_cast<float>(problem.softcap),
      .tokens = narrow(tokens),
      .heads = narrow(problem.query.sizes[1]),
      .size = narrow(problem.query.sizes[2]),
      .value_size = narrow(problem.value_cache.sizes[3]),
      .requests = narrow(requests),
      .table = narrow(problem.block_tables.sizes[1]),
      .queries_each = narrow(requests > 0 ? tokens / requests : 0),
      .pages = narrow(problem.key_cache.sizes[0]),
      .page_size = narrow(problem.key_cache.sizes[1]),
      .page_divider = make_divider(static_cast<uint32_t>(problem.key_cache.sizes[1])),
      .group_divider = make_divider(static_cast<uint32_t>(group_of(problem))),
      .key_heads = narrow(problem.key_cache.sizes[2]),
      .window_left = window_of(problem.window_left),
      .window_right = window_of(problem.window_right),
      .causal = problem.causal};
  return arguments;
}

std::string_view cache_type_name(DType dtype) {
  if (dtype == DType::kFloat8E4M3) return "kernel_pytorch::tile::Float8E4M3";
  return dtype == DType::kInt8 ? "signed char" : element_type_name(dtype);
}

DeviceCode code_of(std::string_view function, std::string_view arguments, const char* source = kSource,
                   int capability = 80) {
  return {.source = source,
          .entry = concat("kernel_pytorch::paged_attention::", function, "<", arguments, ">"),
          .minimum_capability = capability,
          .architecture_specific = false};
}
DeviceCode attend_code(DType dtype, DType cache, const Tile& tile) {
  return code_of("attend", concat(element_type_name(dtype), ", ", cache_type_name(cache), ", ", device_text(tile)));
}
DeviceCode plan_code(const Tile& tile) {
  return code_of("plan", device_text(tile), kWorkSource);
}
DeviceCode combine_code(DType dtype, const Tile& tile) {
  return code_of("combine", concat(element_type_name(dtype), ", ", device_text(tile)), kCombineSource);
}
DeviceCode clear_code(DType dtype) {
  return code_of("clear_rest", element_type_name(dtype), kCombineSource);
}

template <class Arguments>
void launch(Context& context, CUkern_st* kernel, int64_t blocks, int threads, int shared, Arguments& arguments,
            const std::string& label) {
  void* pointers[] = {&arguments};
  cuda_device::LaunchShape shape;
  shape.grid_x = static_cast<unsigned>(blocks);
  shape.block_x = static_cast<unsigned>(threads);
  shape.shared_bytes = static_cast<unsigned>(shared);
  cuda_device::launch(context, kernel, shape, pointers, label);
}

// The most pieces that a call can keep: known from shapes alone.
int64_t set_workers(WorkArguments& work, const Attend& problem, const Tile& tile, int64_t blocks) {
  if (!problem.batch_invariant) {
    work.workers = static_cast<int32_t>(blocks);
    work.unit_tiles = 1;
    return 2 * blocks;
  }
  const int64_t capacity = problem.block_tables.sizes[1] * problem.key_cache.sizes[1];
  const int64_t keys = std::max(kInvariantKeys, divide_up(capacity, kInvariantPieces * tile.keys) * tile.keys);
  work.workers = 0;
  work.unit_tiles = static_cast<int32_t>(keys / tile.keys);
  const int64_t requests = problem.seq_lens.sizes[0];
  const int64_t row_tiles = divide_up(problem.query.sizes[0] * group_of(problem), tile_rows(tile)) + requests;
  return row_tiles * problem.key_cache.sizes[2] * (divide_up(capacity, keys) + 1);
}

void run(const Attend& problem, int, Context& context) {
  static const std::string kPlanLabel = "paged_attention plan", kLabel = "paged_attention",
                           kCombineLabel = "paged_attention combine", kClearLabel = "paged_attention clear";
  constexpr int kVariants = kTileCount * kRowWarpChoices;
  static KernelTable<kVariants> plans;
  static KernelTable<kVariants * 2> attends, combines;
  static KernelTable<2> clears;
  if (problem.output.element_count() == 0 && !problem.lse.is_present()) return;
  if (problem.query.sizes[0] * problem.query.sizes[1] == 0) return;
  const Tile tile = tile_of(problem);
  const int variant = tile_index(problem) * kRowWarpChoices + row_warp_choice(problem);
  const DType dtype = problem.query.dtype;
  const int of_type = variant * 2 + (dtype == DType::kBFloat16 ? 0 : 1);
  WorkArguments work{.attend = attend_arguments(problem)};
  if (problem.cu_seqlens_q.is_present()) {
    launch(context, clears.get(of_type % 2, context, [&] { return clear_code(dtype); }), 32, kThreads, 0, work.attend,
           kClearLabel);
  }
  if (problem.seq_lens.sizes[0] == 0) return;
  const int64_t multiprocessors = std::max(context.info->cuda.multiprocessors, 1);
  const int64_t per_processor =
      std::clamp<int64_t>(context.info->cuda.shared_bytes_per_block / shared_bytes(tile), 1, 3);
  const int64_t blocks = multiprocessors * per_processor;
  const int64_t pieces = set_workers(work, problem, tile, blocks);
  work.plan = static_cast<int64_t*>(
      context.scratch->allocate(static_cast<size_t>(problem.seq_lens.sizes[0] + 1) * sizeof(int64_t)));
  work.partial = static_cast<float*>(
      context.scratch->allocate(static_cast<size_t>(pieces * tile_rows(tile) * (tile.value_size + 2)) * sizeof(float)));
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

std::vector<std::string> configs(const Attend& problem, const DeviceInfo&) {
  return {config_text(tile_of(problem))};
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
  codes.push_back(clear_code(DType::kBFloat16));
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
  return registry::Support::unless(float8_capability(problem.key_cache.dtype) > device.cuda.capability() ? kNeedsFloat8
                                                                                                         : nullptr);
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
