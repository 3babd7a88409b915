// Host side of the backward on mma: means, queries (with the maps of blocks), then sums of tiles of means and of keys,
// and what these add up to.
#include <algorithm>
#include <iterator>
#include <vector>

#include "kernel_pytorch/ops/native_sparse_attention/cuda_mma/launch.h"

namespace kernel_pytorch::native_sparse_attention {
namespace {

constexpr const char* kQuerySource = "kernel_pytorch/ops/native_sparse_attention/cuda_mma/backward_query.cuh";
constexpr const char* kKeySource = "kernel_pytorch/ops/native_sparse_attention/cuda_mma/backward_keys.cuh";
constexpr int64_t kMostBlocks = int64_t{1} << 31;
constexpr int64_t kMostMapBytes = int64_t{1} << 31;
constexpr int64_t kItems = 4096;        // of means: a few waves of a GPU
constexpr int64_t kMostSplits = 32;     // of a tile that many queries see
constexpr int64_t kSplitTokens = 2048;  // for each of these

enum class Entry : uint8_t { kCompress, kClear, kQuery, kMeans, kAddMeans, kKeys, kAddKeys };
constexpr int kEntries = 7;

DeviceCode code_of(Entry entry, DType dtype, int size) {
  const std::string own(element_type_name(dtype)), both = concat(own, ", ", size);
  const auto text = [&]() -> std::string {
    switch (entry) {
      case Entry::kCompress:
        return concat("compress_elements<", own, ">");
      case Entry::kClear:
        return "clear_maps";
      case Entry::kQuery:
        return concat("mma_backward_query<", both, ">");
      case Entry::kMeans:
        return concat("mma_backward_keys<", both, ", true>");
      case Entry::kAddMeans:
        return concat("add_partial<", both, ", true>");
      case Entry::kKeys:
        return concat("mma_backward_keys<", both, ", false>");
      case Entry::kAddKeys:
        return concat("add_partial<", both, ", false>");
    }
    return "";
  };
  const bool is_first = entry == Entry::kCompress || entry == Entry::kClear || entry == Entry::kQuery;
  return {.source = is_first ? kQuerySource : kKeySource,
          .entry = concat("kernel_pytorch::native_sparse_attention::", text()),
          .minimum_capability = 80,
          .architecture_specific = false};
}
std::vector<DeviceCode> all_code() {
  std::vector<DeviceCode> codes{code_of(Entry::kClear, DType::kBFloat16, 0)};
  for (const DType dtype : kMmaTypes) {
    codes.push_back(code_of(Entry::kCompress, dtype, 0));
    for (const int size : kMmaSizes) {
      for (const Entry entry : {Entry::kQuery, Entry::kMeans, Entry::kAddMeans, Entry::kKeys, Entry::kAddKeys}) {
        codes.push_back(code_of(entry, dtype, size));
      }
    }
  }
  return codes;
}

int64_t map_words(const Arguments& a) {
  return a.gates[1].data == nullptr ? 0 : int64_t{a.batch} * a.key_heads * a.key_blocks * divide_up(a.queries, 32);
}

registry::Support supports(const Backward& problem, const DeviceInfo& device) {
  const DType dtype = problem.query.dtype;
  if (dtype != DType::kBFloat16 && dtype != DType::kFloat16) return registry::Support::no("takes bf16 and fp16");
  if (problem.cu_seqlens.is_present()) return registry::Support::no("takes sequences that are not packed");
  const Arguments a = arguments_of(problem);
  if (int64_t{a.batch} * std::max({a.queries, a.keys, a.compressed}) * a.key_heads >= kMostBlocks) {
    return registry::Support::no("has 2^31 tokens of key heads or more");
  }
  if (map_words(a) * 4 > kMostMapBytes) return registry::Support::no("the tokens of each block need more than 2 GiB");
  return registry::Support::unless(mma_obstacle(a, dtype, device, true));
}

struct Launcher {
  Context& context;
  DType dtype;
  int size;

  void operator()(Entry entry, int64_t blocks, int64_t shared_bytes, MmaArguments& arguments) const {
    static KernelTable<kEntries * std::size(kCudaTypes) * 2> table;
    const int types = static_cast<int>(std::size(kCudaTypes));
    const int index = (static_cast<int>(entry) * types + cuda_type_index(dtype)) * 2 + (size == kMmaSizes[0] ? 0 : 1);
    start_mma(context, table.get(index, context, [&] { return code_of(entry, dtype, size); }), blocks, shared_bytes,
              arguments);
  }
};

// Sums of the tiles of keys or means, where any branch has them, and the results. `a` is a copy of its own.
void run_keys(const Launcher& launch, MmaArguments a, int32_t rows, bool is_computed, Entry tiles, Entry sums) {
  const int64_t heads = int64_t{a.all.batch} * a.all.key_heads;
  a.partial = nullptr;
  if (is_computed && rows > 0) {
    const int64_t floats = heads * key_items(a) * kMmaKeys * 2 * launch.size;
    a.partial = scratch_of<float>(launch.context, floats);
    launch(tiles, heads * key_items(a), mma_tile_shared_bytes(launch.size), a);
  }
  launch(sums, heads * rows, 0, a);
}

void run(const Backward& problem, int, Context& context) {
  Arguments all = arguments_of(problem);
  const DType dtype = problem.query.dtype;
  const Launcher launch{context, dtype, mma_size(all)};
  const int64_t heads = int64_t{all.batch} * all.key_heads;
  const bool has_branch = problem.gate_compressed.is_present(), has_lists = problem.gate_selected.is_present();
  const bool has_means = has_branch && !problem.compressed_key.is_present();
  if (has_means) {
    all.means_of_key = all.compressed_key = scratch_rows(context, all, all.compressed, all.size, 2);
    all.means_of_value = all.compressed_value = scratch_rows(context, all, all.compressed, all.value_size, 2);
    all.grad_compressed_key = scratch_rows(context, all, all.compressed, all.size, sizeof(float));
    all.grad_compressed_value = scratch_rows(context, all, all.compressed, all.value_size, sizeof(float));
    all.adds_means = true;
  }
  MmaArguments a = mma_arguments(all, context.info->cuda.shared_bytes_per_block, true);
  for (int branch = 0; branch < kBranches; ++branch) {
    const int64_t rows = all.gates[branch].data == nullptr ? 0 : int64_t{all.batch} * all.queries * all.heads;
    a.statistics[branch] = scratch_of<Statistics>(context, rows);
  }
  a.words = static_cast<int32_t>(divide_up(all.queries, 32));
  a.seen_by = scratch_of<uint32_t>(context, map_words(all));
  a.repeats = scratch_of<int32_t>(context, 1);
  if (has_means) launch(Entry::kCompress, heads * all.compressed, 0, a);
  if (has_lists)
    launch(Entry::kClear, std::clamp<int64_t>(divide_up(map_words(all), 4 * kMmaThreads), 1, kItems), 0, a);
  launch(Entry::kQuery, heads * a.tiles, mma_shared_bytes(a, launch.size, true), a);
  if (has_branch || all.grad_compressed_key.data != nullptr) {
    a.tile_block = kMmaKeys, a.block_tiles = 1;
    a.key_tiles = a.first_tiles = static_cast<int32_t>(divide_up(all.compressed, kMmaKeys));
    const int64_t most = std::clamp<int64_t>(all.queries / kSplitTokens, 1, kMostSplits);
    a.splits = static_cast<int32_t>(
        std::clamp<int64_t>(divide_up(kItems, std::max<int64_t>(heads * a.key_tiles, 1)), 1, most));
    run_keys(launch, a, all.compressed, has_branch, Entry::kMeans, Entry::kAddMeans);
  }
  a.tile_block = has_lists ? all.block_size : kMmaKeys;
  a.block_tiles = static_cast<int32_t>(divide_up(a.tile_block, kMmaKeys));
  a.key_tiles = static_cast<int32_t>(divide_up(all.keys, a.tile_block)) * a.block_tiles;
  // The first blocks are on every list.
  a.splits = static_cast<int32_t>(std::clamp<int64_t>(all.queries / kSplitTokens, 1, kMostSplits));
  a.first_tiles =
      has_lists ? static_cast<int32_t>(std::min<int64_t>(int64_t{all.first_blocks} * a.block_tiles, a.key_tiles)) : 0;
  run_keys(launch, a, all.keys, has_lists || problem.gate_window.is_present(), Entry::kKeys, Entry::kAddKeys);
}

uint64_t hash() {
  return jit::source_hash(kQuerySource) ^ jit::source_hash(kKeySource) << 1;
}

}  // namespace

constinit const registry::Kernel<Backward> kBackwardMma{
    .name = "cuda_mma", .supports = supports, .run = run, .source_hash = hash, .device_code = all_code};

}  // namespace kernel_pytorch::native_sparse_attention
