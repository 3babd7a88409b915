// Host side of the CUDA kernels: how many queries a block of threads has, where their candidates lie, and into how many
// splits the keys are cut so that few queries fill the GPU.
#include <algorithm>
#include <iterator>
#include <string>
#include <vector>

#include "kernel_pytorch/base/error.h"
#include "kernel_pytorch/device/cuda/driver.h"
#include "kernel_pytorch/jit/jit.h"
#include "kernel_pytorch/ops/lightning_indexer/cuda/arguments_cuda.h"
#include "kernel_pytorch/ops/lightning_indexer/operation.h"
#include "kernel_pytorch/ops/support/cuda_support.h"

namespace kernel_pytorch::lightning_indexer {
namespace {

constexpr const char* kFmaSource = "kernel_pytorch/ops/lightning_indexer/cuda/fma.cuh";
constexpr const char* kMmaSource = "kernel_pytorch/ops/lightning_indexer/cuda/mma.cuh";
constexpr const char* kMergeSource = "kernel_pytorch/ops/lightning_indexer/cuda/merge.cuh";
constexpr DType kTypes[] = {DType::kFloat32, DType::kBFloat16, DType::kFloat16, DType::kFloat8E4M3};
constexpr int kMmaChunks[] = {1, 2, 4, 8};  // of 32 columns
constexpr int64_t kSharedReserve = 2048;    // for what kernels declare themselves
constexpr int64_t kBlocksOfMultiprocessor = 4;
constexpr int64_t kLeastSplitKeys = 256;

int type_index(DType dtype) {
  return dtype == DType::kFloat8E4M3 ? 3 : cuda_type_index(dtype);
}
int chunk_index(int64_t size) {
  int index = 0;
  while (index < static_cast<int>(std::size(kMmaChunks)) && kMmaChunks[index] * kChunkColumns < size) ++index;
  return index;
}

// `chunks` 0: by FMA.
DeviceCode choose_code(DType dtype, int chunks) {
  const std::string type(element_type_name(dtype));
  return {.source = chunks == 0 ? kFmaSource : kMmaSource,
          .entry = chunks == 0 ? concat("kernel_pytorch::lightning_indexer::choose_by_fma<", type, ">")
                               : concat("kernel_pytorch::lightning_indexer::choose_by_mma<", type, ", ", chunks, ">"),
          .minimum_capability = dtype == DType::kFloat8E4M3 ? 89 : 80,
          .architecture_specific = false};
}
DeviceCode merge_code() {
  return {.source = kMergeSource,
          .entry = "kernel_pytorch::lightning_indexer::merge",
          .minimum_capability = 80,
          .architecture_specific = false};
}
std::vector<DeviceCode> all_fma_code() {
  std::vector<DeviceCode> codes{merge_code()};
  for (const DType dtype : kTypes) codes.push_back(choose_code(dtype, 0));
  return codes;
}
std::vector<DeviceCode> all_mma_code() {
  std::vector<DeviceCode> codes{merge_code()};
  for (const DType dtype : kTypes) {
    if (dtype == DType::kFloat32) continue;
    for (const int chunks : kMmaChunks) codes.push_back(choose_code(dtype, chunks));
  }
  return codes;
}

int32_t capacity_of(int64_t wanted) {
  return static_cast<int32_t>(wanted + std::max<int64_t>(wanted, 4 * kStepKeys));
}

Arguments arguments_of(const Index& problem, const DeviceInfo& device, int chunks) {
  const Sizes sizes(problem);
  Arguments a{};
  a.query = problem.query.data, a.key = problem.key.data;
  a.weights = problem.weights.as<const float>(), a.key_scale = problem.key_scale.as<const float>();
  a.lengths = problem.key_lengths.as<const int32_t>(), a.tables = problem.block_tables.as<const int32_t>();
  a.query_batch = problem.query.strides[0], a.query_token = problem.query.strides[1];
  a.query_head = problem.query.strides[2];
  a.key_first = problem.key.strides[0], a.key_second = problem.key.strides[1];
  a.weights_batch = problem.weights.strides[0], a.weights_token = problem.weights.strides[1];
  a.weights_head = problem.weights.strides[2];
  if (problem.key_scale.is_present()) {
    a.scale_first = problem.key_scale.strides[0], a.scale_second = problem.key_scale.strides[1];
  }
  a.indices = problem.indices.as<int32_t>();
  a.batch = static_cast<int32_t>(sizes.batch), a.queries = static_cast<int32_t>(sizes.queries);
  a.heads = static_cast<int32_t>(sizes.heads), a.size = static_cast<int32_t>(sizes.size);
  a.page_size = static_cast<int32_t>(sizes.page_size), a.table = static_cast<int32_t>(sizes.table);
  a.pages = static_cast<int32_t>(problem.key.sizes[0]);
  a.keys = static_cast<int32_t>(sizes.keys), a.top_k = static_cast<int32_t>(problem.top_k);
  a.tile_queries = static_cast<int32_t>(std::clamp<int64_t>(sizes.queries, 1, kMostTileQueries));
  const auto shared = [&] { return (chunks == 0 ? 0 : query_bytes(a, chunks)) + kSharedReserve; };
  while (a.tile_queries > 1 && shared() > device.cuda.shared_bytes_per_block) --a.tile_queries;
  // As many splits as give each multiprocessor two blocks; a split keeps top_k keys, of twice as many at least.
  const int64_t tiles = sizes.batch * divide_up(sizes.queries, a.tile_queries);
  const int64_t least_keys = std::max(2 * problem.top_k, kLeastSplitKeys);
  const int64_t most = std::max<int64_t>(sizes.keys / least_keys, 1);
  const int64_t filling = divide_up(2 * std::max(device.cuda.multiprocessors, 1), std::max<int64_t>(tiles, 1));
  a.split_keys = static_cast<int32_t>(divide_up(sizes.keys, std::clamp<int64_t>(filling, 1, most)));
  a.splits = static_cast<int32_t>(std::max<int64_t>(divide_up(sizes.keys, std::max(a.split_keys, 1)), 1));
  a.wanted = a.split_wanted = static_cast<int32_t>(std::min<int64_t>(problem.top_k, a.split_keys));
  a.capacity = capacity_of(a.wanted);
  return a;
}

// As many blocks as run at once, each with its candidates in shared memory or, where these do not fit, in scratch.
void start(Context& context, CUkern_st* kernel, Arguments& a, int64_t items, int64_t own_bytes) {
  static const std::string kLabel = "lightning_indexer";
  const CudaInfo& device = context.info->cuda;
  int64_t bytes = (own_bytes + 7) / 8 * 8;
  const bool is_shared = bytes + kept_bytes(a) + kSharedReserve <= device.shared_bytes_per_block;
  if (is_shared) bytes += kept_bytes(a);
  const int64_t fitting = device.shared_bytes_per_multiprocessor / (bytes + kSharedReserve);
  const int64_t blocks =
      std::min(items, std::max(device.multiprocessors, 1) * std::clamp<int64_t>(fitting, 1, kBlocksOfMultiprocessor));
  a.kept = is_shared ? nullptr
                     : static_cast<uint64_t*>(context.scratch->allocate(static_cast<size_t>(blocks * kept_bytes(a))));
  void* pointers[] = {&a};
  cuda_device::LaunchShape shape;
  shape.grid_x = static_cast<unsigned>(blocks);
  shape.block_x = kThreads;
  shape.shared_bytes = static_cast<unsigned>(bytes);
  cuda_device::launch(context, kernel, shape, pointers, kLabel);
}

template <bool kIsMma>
void run(const Index& problem, int, Context& context) {
  static KernelTable<std::size(kTypes) * std::size(kMmaChunks)> choose_table;
  static KernelTable<1> merge_table;
  if (problem.indices.element_count() == 0) return;
  const DType dtype = problem.query.dtype;
  const int index = kIsMma ? chunk_index(problem.query.sizes[3]) : 0;
  const int chunks = kIsMma ? kMmaChunks[index] : 0;
  Arguments a = arguments_of(problem, *context.info, chunks);
  const int64_t queries = int64_t{a.batch} * a.queries, lists = queries * a.splits;
  if (a.splits > 1) {
    a.partial = static_cast<uint64_t*>(context.scratch->allocate(static_cast<size_t>(lists * a.split_wanted * 8)));
  }
  const int entry = type_index(dtype) * static_cast<int>(std::size(kMmaChunks)) + index;
  CUkern_st* kernel = choose_table.get(entry, context, [&] { return choose_code(dtype, chunks); });
  const int64_t items = int64_t{a.batch} * divide_up(a.queries, a.tile_queries) * a.splits;
  start(context, kernel, a, items, kIsMma ? query_bytes(a, chunks) : 0);
  if (a.splits == 1) return;
  a.tile_queries = 1;
  a.wanted = static_cast<int32_t>(std::min<int64_t>(problem.top_k, a.keys));
  a.capacity = capacity_of(a.wanted);
  start(context, merge_table.get(0, context, merge_code), a, queries, 0);
}

registry::Support supports_fma(const Index& problem, const DeviceInfo& device) {
  if (const char* obstacle = cuda_obstacle(device)) return registry::Support::no(obstacle);
  const bool is_float8 = problem.query.dtype == DType::kFloat8E4M3;
  return registry::Support::unless(is_float8 ? float8_obstacle(device) : nullptr);
}
registry::Support supports_mma(const Index& problem, const DeviceInfo& device) {
  if (registry::Support support = supports_fma(problem, device); !support) return support;
  if (problem.query.dtype == DType::kFloat32) return registry::Support::no("multiplies bf16, fp16 and e4m3");
  const int64_t size = problem.query.sizes[3];
  if (chunk_index(size) == static_cast<int>(std::size(kMmaChunks))) {
    return registry::Support::no("takes rows of up to 256 elements");
  }
  const int64_t bytes = 8 * size_of(problem.query.dtype);
  if (size % 8 != 0 || !has_aligned_rows(problem.query, bytes) || !has_aligned_rows(problem.key, bytes)) {
    return registry::Support::no("reads rows by eight elements; sizes and strides must be multiples of them");
  }
  const int chunks = kMmaChunks[chunk_index(size)];
  const Arguments a = arguments_of(problem, device, chunks);
  if (query_bytes(a, chunks) + kSharedReserve > device.cuda.shared_bytes_per_block) {
    return registry::Support::no("the heads of a query do not fit into shared memory");
  }
  return registry::Support::yes();
}

uint64_t fma_hash() {
  return jit::source_hash(kFmaSource) ^ jit::source_hash(kMergeSource);
}
uint64_t mma_hash() {
  return jit::source_hash(kMmaSource) ^ jit::source_hash(kMergeSource);
}

}  // namespace

constinit const registry::Kernel<Index> kIndexMma{.name = "cuda_mma",
                                                  .supports = supports_mma,
                                                  .run = run<true>,
                                                  .source_hash = mma_hash,
                                                  .device_code = all_mma_code};
constinit const registry::Kernel<Index> kIndexCuda{
    .name = "cuda", .supports = supports_fma, .run = run<false>, .source_hash = fma_hash, .device_code = all_fma_code};

}  // namespace kernel_pytorch::lightning_indexer
