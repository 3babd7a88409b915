#include "kernel_pytorch/ops/paged_attention/cuda/attend_host.h"

#include <algorithm>
#include <cmath>

namespace kernel_pytorch::paged_attention {
namespace {

constexpr const char* kWorkSource = "kernel_pytorch/ops/paged_attention/cuda/work.cuh";
constexpr const char* kCombineSource = "kernel_pytorch/ops/paged_attention/cuda/combine.cuh";
constexpr const char* kOtherTypes = "takes bf16 and fp16 with caches of that type or e4m3";
constexpr const char* kUnaligned = "rows of the caches must begin at multiples of 16 bytes";
constexpr const char* kManyKeys = "takes tables that name up to 2^30 keys, and up to 2^31 rows";
constexpr int64_t kUnbounded = int64_t{1} << 30;
constexpr int64_t kInvariantKeys = 2048;  // of a piece, whatever the batch
constexpr int64_t kInvariantPieces = 32;  // at most, of a request

bool has_aligned_pages(const TensorView& cache) {
  const int64_t bytes = size_of(cache.dtype);
  if (reinterpret_cast<uintptr_t>(cache.data) % 16 != 0) return false;
  for (int i = 0; i < 3; ++i) {
    if (cache.sizes[i] > 1 && cache.strides[i] * bytes % 16 != 0) return false;
  }
  return true;
}

// The most pieces that a call can keep: known from shapes alone.
int64_t set_pieces(WorkArguments& work, const Attend& problem, const Tile& tile, int64_t blocks) {
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
  return row_tiles * problem.key_cache.sizes[2] / tile.heads * (divide_up(capacity, keys) + 1);
}

int32_t window_of(int64_t side) {
  return static_cast<int32_t>(side < 0 ? kUnbounded : std::min(side, kUnbounded));
}

}  // namespace

int64_t group_of(const Attend& problem) {
  return problem.query.sizes[1] / std::max<int64_t>(problem.key_cache.sizes[2], 1);
}
int64_t most_queries(const Attend& problem) {
  const int64_t tokens = problem.query.sizes[0], requests = std::max<int64_t>(problem.seq_lens.sizes[0], 1);
  if (!problem.cu_seqlens_q.is_present()) return tokens / requests;
  return problem.max_seqlen_q > 0 ? std::min(problem.max_seqlen_q, tokens) : tokens;
}
const char* size_obstacle(const Attend& problem) {
  const bool has_many = problem.block_tables.sizes[1] * problem.key_cache.sizes[1] >= kUnbounded ||
                        problem.query.sizes[0] * problem.query.sizes[1] >= int64_t{1} << 31;
  return has_many ? kManyKeys : nullptr;
}

const char* tensor_core_obstacle(const Attend& problem, const DeviceInfo& device) {
  if (const char* obstacle = cuda_obstacle(problem.query.dtype, device)) return obstacle;
  const DType cache = problem.key_cache.dtype;
  const bool is_half = problem.query.dtype != DType::kFloat32;
  if (!is_half || (cache != problem.query.dtype && cache != DType::kFloat8E4M3)) return kOtherTypes;
  if (!has_aligned_pages(problem.key_cache) || !has_aligned_pages(problem.value_cache)) return kUnaligned;
  return size_obstacle(problem);
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

DeviceCode code_of(std::string_view function, std::string_view arguments, const char* source, int capability,
                   bool architecture_specific) {
  return {.source = source,
          .entry = concat("kernel_pytorch::paged_attention::", function, "<", arguments, ">"),
          .minimum_capability = capability,
          .architecture_specific = architecture_specific};
}
DeviceCode plan_code(const Tile& tile) {
  return code_of("plan", device_text(tile), kWorkSource);
}
DeviceCode combine_code(DType dtype, const Tile& tile) {
  return code_of("combine", concat(element_type_name(dtype), ", ", device_text(tile)), kCombineSource);
}

void set_workers(WorkArguments& work, const Attend& problem, const Tile& tile, int64_t blocks, Context& context) {
  const int64_t pieces = set_pieces(work, problem, tile, blocks);
  const int64_t floats = pieces * tile.heads * tile_rows(tile) * (tile.value_size + 2);
  work.partial = static_cast<float*>(context.scratch->allocate(static_cast<size_t>(floats) * sizeof(float)));
}

}  // namespace kernel_pytorch::paged_attention
