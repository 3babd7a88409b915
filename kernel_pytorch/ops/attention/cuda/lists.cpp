// Block lists as kernels on the GPU take them: their own counts in packed sequences, the order in which their tiles are
// taken (attention/cuda/list_order.cuh), and a map for kernels whose tiles do not divide theirs.
#include <algorithm>

#include "kernel_pytorch/base/error.h"
#include "kernel_pytorch/device/cuda/driver.h"
#include "kernel_pytorch/ops/attention/cuda/features.h"

namespace kernel_pytorch::attention {
namespace {

constexpr int kThreads = 1024;
// More of them take a block of threads long, and one that comes late is little among so many.
constexpr int64_t kMostTiles = 1 << 16;

BlockIndex block_index_of(const TensorView& counts, const TensorView& blocks) {
  if (!counts.is_present()) return {};
  const auto stride = [](const TensorView& view, int i) { return view.sizes[i] == 1 ? 0 : view.strides[i]; };
  return {.counts = counts.as<const int32_t>(),
          .blocks = blocks.as<const int32_t>(),
          .counts_batch = stride(counts, 0),
          .counts_head = stride(counts, 1),
          .counts_row = counts.strides[2],
          .blocks_batch = stride(blocks, 0),
          .blocks_head = stride(blocks, 1),
          .blocks_row = blocks.strides[2],
          .blocks_place = blocks.strides[3]};
}

// For packed sequences: counts how many blocks of its lists each sequence uses.
void trim_lists(BlockIndex& index, const TensorView& counts, const TensorView& offsets, int64_t block, int64_t longest,
                Context& context) {
  if (!counts.is_present()) return;
  static const std::string kLabel = "attention lists of packed sequences";
  static KernelTable<1> table;
  CUkern_st* kernel = table.get(0, context, [] { return prepare_code("trim_lists"); });
  int32_t sequences = static_cast<int32_t>(offsets.size(0) - 1), heads = static_cast<int32_t>(counts.size(1));
  int32_t rows = static_cast<int32_t>(counts.size(2)), columns = static_cast<int32_t>(block);
  int32_t most = static_cast<int32_t>(longest);
  const int64_t lists = int64_t{sequences} * heads * rows;
  if (lists == 0) return;
  auto* trimmed = static_cast<int32_t*>(context.scratch->allocate(static_cast<size_t>(lists) * sizeof(int32_t)));
  const int32_t* offset_data = offsets.as<const int32_t>();
  void* pointers[] = {&index, &offset_data, &sequences, &heads, &rows, &columns, &most, &trimmed};
  cuda_device::LaunchShape shape;
  shape.grid_x = static_cast<unsigned>(divide_up(lists, 128));
  shape.block_x = 128;
  cuda_device::launch(context, kernel, shape, pointers, kLabel);
  index.counts = trimmed;
  index.counts_batch = int64_t{heads} * rows;
  index.counts_head = heads == 1 ? 0 : rows;
}

}  // namespace

void add_lists(const Scoring& scoring, ScoreArguments& arguments, Context& context) {
  const BlockList& blocks = scoring.block_list;
  const int32_t queries = static_cast<int32_t>(blocks.query_block), keys = static_cast<int32_t>(blocks.key_block);
  BlockLists &by_query = arguments.key_blocks, &by_key = arguments.query_blocks;
  by_query = {queries, keys, block_index_of(blocks.key_counts, blocks.key_blocks),
              block_index_of(blocks.full_key_counts, blocks.full_key_blocks)};
  by_key = {keys, queries, block_index_of(blocks.query_counts, blocks.query_blocks),
            block_index_of(blocks.full_query_counts, blocks.full_query_blocks)};
  if (!scoring.is_packed()) return;
  trim_lists(by_query.partial, blocks.key_counts, scoring.cu_seqlens_k, keys, arguments.keys, context);
  trim_lists(by_query.full, blocks.full_key_counts, scoring.cu_seqlens_k, keys, arguments.keys, context);
  trim_lists(by_key.partial, blocks.query_counts, scoring.cu_seqlens_q, queries, arguments.queries, context);
  trim_lists(by_key.full, blocks.full_query_counts, scoring.cu_seqlens_q, queries, arguments.queries, context);
}

void add_block_map(const Scoring& scoring, ScoreArguments& arguments, Context& context) {
  static const std::string kLabel = "attention block map";
  static KernelTable<1> table;
  const BlockList& list = scoring.block_list;
  const int64_t batches = list.key_counts.size(0), heads = list.key_counts.size(1), rows = list.key_counts.size(2);
  const int64_t columns = divide_up(arguments.keys, list.key_block);
  const int64_t bytes = batches * heads * rows * columns;
  if (bytes == 0) return;
  BlockMap& map = arguments.block_map;
  void* states = context.scratch->allocate(static_cast<size_t>(bytes));
  cuda_device::fill_bytes(context.info->device.index, states, 0, static_cast<size_t>(bytes), context.stream);
  map = {static_cast<const uint8_t*>(states), batches == 1 ? 0 : heads * rows * columns,
         heads == 1 ? 0 : rows * columns, columns};
  CUkern_st* kernel = table.get(0, context, [] { return prepare_code("map_blocks"); });
  int32_t head_count = static_cast<int32_t>(heads), row_count = static_cast<int32_t>(rows);
  BlockLists lists = arguments.key_blocks;
  lists.partial = block_index_of(list.key_counts, list.key_blocks);  // whole ones: sequences may share them
  lists.full = block_index_of(list.full_key_counts, list.full_key_blocks);
  void* pointers[] = {&lists, &map, &head_count, &row_count};
  cuda_device::LaunchShape shape;
  shape.grid_x = static_cast<unsigned>(rows * batches * heads);
  shape.block_x = 128;
  cuda_device::launch(context, kernel, shape, pointers, kLabel);
}

DeviceCode list_order_code() {
  DeviceCode code;
  code.source = "kernel_pytorch/ops/attention/cuda/list_order.cuh";
  code.entry = "kernel_pytorch::attention::order_lists";
  return code;
}

const int32_t* order_lists(const Features& features, const ScoreArguments& arguments, bool over_keys, int tile_rows,
                           int64_t section_units, Context& context) {
  static const std::string kLabel = "attention list order";
  static KernelTable<1> table;
  if (!features.blocks || features.packed) return nullptr;
  const int64_t tiles = divide_up(over_keys ? arguments.queries : arguments.keys, tile_rows);
  const int32_t group = over_keys ? 1 : arguments.group;
  const int64_t units = int64_t{arguments.batches} * arguments.heads / group;
  // Where all tiles are under way at once there is no order.
  if (units * tiles <= context.info->cuda.multiprocessors || units * tiles > kMostTiles) return nullptr;
  ListOrderArguments order{};
  order.lists = over_keys ? arguments.key_blocks : arguments.query_blocks;
  order.tiles = static_cast<int32_t>(tiles);
  order.row_tiles = order.lists.rows / tile_rows;
  order.units = static_cast<int32_t>(units);
  order.heads = arguments.heads;
  order.group = group;
  order.section_units = static_cast<int32_t>(std::min(section_units, units));
  const size_t bytes = static_cast<size_t>(units * tiles) * sizeof(int32_t);
  order.lengths = static_cast<int32_t*>(context.scratch->allocate(bytes));
  order.order = static_cast<int32_t*>(context.scratch->allocate(bytes));
  void* pointers[] = {&order};
  cuda_device::LaunchShape shape;
  shape.grid_x = static_cast<unsigned>(divide_up(units, order.section_units));
  shape.block_x = kThreads;
  shape.programmatic_dependent = has_feature(*context.info, CudaFeature::kDependentLaunch);
  cuda_device::launch(context, table.get(0, context, list_order_code), shape, pointers, kLabel);
  return order.order;
}

}  // namespace kernel_pytorch::attention
