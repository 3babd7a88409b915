// Host side of the forward on mma: means of blocks as elements in scratch memory, then a block of threads for each tile
// of 64 rows, or as many as run at once for tiles of 128.
#include <algorithm>
#include <iterator>
#include <string>
#include <vector>

#include "kernel_pytorch/ops/native_sparse_attention/cuda_mma/launch.h"

namespace kernel_pytorch::native_sparse_attention {
namespace {

constexpr const char* kSource = "kernel_pytorch/ops/native_sparse_attention/cuda_mma/forward.cuh";
constexpr int64_t kMostBlocks = int64_t{1} << 31;

constexpr int64_t kWideBytes = 120 << 10;  // of shared memory of a block, that tiles of 128 rows may need
constexpr int kWidestOfWide = 64;          // columns of heads: with 128 their registers spill
constexpr int kResident = 2;               // blocks of a multiprocessor

// `size` 0: the kernel of means.
DeviceCode code_of(DType dtype, int size, int row_blocks) {
  const std::string own(element_type_name(dtype)), of = "kernel_pytorch::native_sparse_attention::";
  return {.source = kSource,
          .entry = size == 0 ? concat(of, "compress_elements<", own, ">")
                             : concat(of, "mma_forward<", own, ", ", size, ", ", row_blocks, ">"),
          .minimum_capability = 80,
          .architecture_specific = false};
}
std::vector<DeviceCode> all_code() {
  std::vector<DeviceCode> codes;
  for (const DType dtype : kMmaTypes) {
    codes.push_back(code_of(dtype, 0, 0));
    for (const int size : kMmaSizes) {
      codes.push_back(code_of(dtype, size, 1));
      if (size <= kWidestOfWide) codes.push_back(code_of(dtype, size, 2));
    }
  }
  return codes;
}

registry::Support supports(const Forward& problem, const DeviceInfo& device) {
  const DType dtype = problem.query.dtype;
  if (dtype != DType::kBFloat16 && dtype != DType::kFloat16) return registry::Support::no("takes bf16 and fp16");
  const Arguments a = arguments_of(problem);
  if (int64_t{a.batch} * std::max(a.queries, a.compressed) * a.key_heads >= kMostBlocks) {
    return registry::Support::no("has 2^31 tokens of key heads or more");
  }
  return registry::Support::unless(mma_obstacle(a, dtype, device, false));
}

bool may_be_wide(const Forward& problem, const DeviceInfo& device) {
  return device.cuda.shared_bytes_per_block >= kWideBytes &&
         std::max(problem.query.sizes[3], problem.value.sizes[3]) <= kWidestOfWide;
}
std::vector<std::string> configs(const Forward& problem, const DeviceInfo& device) {
  if (!may_be_wide(problem, device)) return {"rows=64"};
  return {"rows=64", "rows=128"};
}
MmaArguments wide_arguments(const Arguments& all, const DeviceInfo& device) {
  return mma_arguments(all, std::min(device.cuda.shared_bytes_per_block, kWideBytes), false, 2);
}
bool takes_wide(const MmaArguments& wide) {
  return (wide.all.chooses || wide.all.lists == nullptr) &&  // given ones may name a block twice
         mma_shared_bytes(wide, mma_size(wide.all), false) + kMmaReserve <= kWideBytes;
}
// Wide tiles where they fill the GPU.
int heuristic(const Forward& problem, const DeviceInfo& device) {
  if (!may_be_wide(problem, device)) return 0;
  const MmaArguments wide = wide_arguments(arguments_of(problem), device);
  const int64_t items = int64_t{wide.all.batch} * wide.all.key_heads * wide.tiles;
  return takes_wide(wide) && items >= int64_t{2 * kResident} * device.cuda.multiprocessors ? 1 : 0;
}

void run(const Forward& problem, int config, Context& context) {
  static KernelTable<std::size(kCudaTypes) * 5> table;
  const DType dtype = problem.query.dtype;
  const auto kernel = [&](int size, int row_blocks) {
    const int of_size = size == 0 ? 0 : (size == kMmaSizes[0] ? 0 : 2) + row_blocks;
    return table.get(cuda_type_index(dtype) * 5 + of_size, context, [&] { return code_of(dtype, size, row_blocks); });
  };
  Arguments all = arguments_of(problem);
  const bool needs_means =
      !problem.compressed_key.is_present() && (problem.gate_compressed.is_present() || all.chooses);
  if (needs_means) {
    all.means_of_key = all.compressed_key = scratch_rows(context, all, all.compressed, all.size, 2);
    all.means_of_value = all.compressed_value = scratch_rows(context, all, all.compressed, all.value_size, 2);
  }
  const DeviceInfo& device = *context.info;
  MmaArguments a = mma_arguments(all, device.cuda.shared_bytes_per_block, false);
  int row_blocks = 1;
  if (config == 1) {
    const MmaArguments wide = wide_arguments(all, device);
    if (takes_wide(wide)) a = wide, row_blocks = 2;
  }
  const int64_t heads = int64_t{all.batch} * all.key_heads;
  const int size = mma_size(all);
  int64_t blocks = heads * a.tiles;
  if (row_blocks == 2) {
    blocks = std::min(blocks, int64_t{kResident} * std::max(device.cuda.multiprocessors, 1));
    const int64_t scores = all.chooses ? blocks * tile_tokens(a) * all.key_blocks : 0;
    a.parked = scratch_of<float>(context, blocks * kMmaRows * row_blocks * size);
    a.block_scores = scratch_of<float>(context, scores);
  }
  if (needs_means) start_mma(context, kernel(0, 0), heads * all.compressed, 0, a);
  start_mma(context, kernel(size, row_blocks), blocks, mma_shared_bytes(a, size, false), a);
}

uint64_t hash() {
  return jit::source_hash(kSource);
}

}  // namespace

constinit const registry::Kernel<Forward> kForwardMma{.name = "cuda_mma",
                                                      .supports = supports,
                                                      .configs = configs,
                                                      .heuristic = heuristic,
                                                      .run = run,
                                                      .source_hash = hash,
                                                      .device_code = all_code};

}  // namespace kernel_pytorch::native_sparse_attention
