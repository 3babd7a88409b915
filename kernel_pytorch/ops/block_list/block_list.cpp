#include "kernel_pytorch/ops/block_list/block_list.h"

#include <algorithm>
#include <string_view>
#include <tuple>

#include "kernel_pytorch/base/error.h"
#include "kernel_pytorch/ops/block_list/operation.h"
#include "kernel_pytorch/registry/choose.h"

namespace kernel_pytorch::block_list {
namespace {

// What every tensor of a call must be: there, on the call's device, of this shape, contiguous.
struct ListCheck {
  std::string_view op;
  Device device;

  void check(std::string_view name, const TensorView& view, std::initializer_list<int64_t> shape) const {
    KP_CHECK(view.is_present(), op, ": ", name, " is missing");
    KP_CHECK(view.device == device, op, ": ", name, " is on ", view.device, ", the call runs on ", device,
             "; move all tensors to one device");
    KP_CHECK(std::ranges::equal(view.shape(), shape), op, ": ", name, " has shape ", shape_text(view.shape()),
             "; it must be ", shape_text({shape.begin(), shape.size()}));
    KP_CHECK(is_contiguous(view), op, ": ", name, " is ", view, "; make it contiguous");
  }

  void check_map(std::string_view name, const TensorView& map) const {
    KP_CHECK(map.rank == 4, op, ": ", name, " has shape ", shape_text(map.shape()),
             "; it must be [batch, heads, rows, columns]");
    KP_CHECK(map.dtype == DType::kInt8 || map.dtype == DType::kBool, op, ": ", name, " is ", map.dtype,
             "; convert it to int8 (0 empty, 1 partial, 2 full) or bool");
    check(name, map, {map.sizes[0], map.sizes[1], map.sizes[2], map.sizes[3]});
    KP_CHECK(map.sizes[2] < int64_t{1} << 31 && map.sizes[3] < int64_t{1} << 31, op, ": ", name, " has ", map.sizes[2],
             " by ", map.sizes[3], " blocks; at most 2^31 - 1 are supported, make them larger");
  }

  void check_list(std::string_view name, const List& list, const TensorView& map, int64_t lists, int64_t n) const {
    if (!list.is_present()) return;
    check(name, list.counts, {map.sizes[0], map.sizes[1], lists});
    check(name, list.blocks, {map.sizes[0], map.sizes[1], lists, n});
    KP_CHECK(list.counts.dtype == DType::kInt32 && list.blocks.dtype == DType::kInt32, op, ": counts of ", name,
             " are ", list.counts.dtype, ", blocks are ", list.blocks.dtype, "; both must be int32");
  }
};

int64_t blocks_of(int64_t tokens, int64_t block) {
  return tokens / block + (tokens % block != 0);
}

void check_numbers(const Select& arguments) {
  KP_CHECK(arguments.queries >= 0 && arguments.keys >= 0, "block_select: there are ", arguments.queries,
           " queries and ", arguments.keys, " keys; neither may be negative");
  const bool is_known = arguments.query_block > 0 && arguments.query_block <= kLargestBlock &&
                        arguments.key_block > 0 && arguments.key_block <= kLargestBlock;
  KP_CHECK(is_known, "block_select: blocks are ", arguments.query_block, " by ", arguments.key_block,
           "; both sizes must be from 1 to ", kLargestBlock);
  KP_CHECK(arguments.key_parts > 0 && arguments.key_block % arguments.key_parts == 0, "block_select: a block of ",
           arguments.key_block, " keys is cut into ", arguments.key_parts, " parts; their number must divide it");
  KP_CHECK(arguments.sparsity >= 0 && arguments.sparsity <= 1, "block_select: sparsity is ", arguments.sparsity,
           "; it must be from 0 to 1");
  KP_CHECK(arguments.sinks >= 0 && arguments.local >= 0, "block_select: ", arguments.sinks, " sinks and ",
           arguments.local, " local blocks are kept; neither may be negative");
  const int64_t most = int64_t{1} << 30;
  KP_CHECK(blocks_of(arguments.queries, arguments.query_block) < most &&
               blocks_of(arguments.keys, arguments.key_block / arguments.key_parts) < most,
           "block_select: ", arguments.queries, " queries and ", arguments.keys,
           " keys make more than 2^30 blocks; make them larger");
}

void check_scores(const ListCheck& check, const Select& arguments, const Grid& grid) {
  const TensorView& scores = arguments.scores;
  KP_CHECK(!arguments.query.is_present() && !arguments.key.is_present(),
           "block_select: scores are given and pooled tensors too; give one of them");
  KP_CHECK(scores.device == check.device, "block_select: scores are on ", scores.device, ", the call runs on ",
           check.device, "; move all tensors to one device");
  KP_CHECK(scores.dtype == DType::kFloat32, "block_select: scores are ", scores.dtype, "; convert them to fp32");
  KP_CHECK(scores.rank == 4 && scores.sizes[2] == grid.rows && scores.sizes[3] == grid.columns,
           "block_select: scores have shape ", shape_text(scores.shape()), "; they must be [batch, heads, ", grid.rows,
           ", ", grid.columns, "]");
}

void check_pooled(const ListCheck& check, const Select& arguments, const Grid& grid) {
  const int64_t parts = blocks_of(arguments.keys, arguments.key_block / arguments.key_parts);
  for (const auto& [name, view, rows] :
       {std::tuple<std::string_view, const TensorView&, int64_t>{"query", arguments.query, grid.rows},
        {"key", arguments.key, parts}}) {
    KP_CHECK(view.is_present(), "block_select: ", name, " is missing, and there are no scores");
    KP_CHECK(view.device == check.device, "block_select: ", name, " is on ", view.device, ", the call runs on ",
             check.device, "; move all tensors to one device");
    const bool is_known = view.dtype == DType::kFloat32 || view.dtype == DType::kBFloat16 ||
                          view.dtype == DType::kFloat16 ||
                          (view.dtype == DType::kFloat64 && check.device.kind == DeviceKind::kCpu);
    KP_CHECK(is_known && view.dtype == arguments.query.dtype, "block_select: ", name, " is ", view.dtype, ", query is ",
             arguments.query.dtype, "; both must be fp32, bf16, fp16, or on the CPU fp64");
    KP_CHECK(view.rank == 4 && view.sizes[2] == rows, "block_select: ", name, " has shape ", shape_text(view.shape()),
             "; it must be [batch, heads, ", rows, ", size], means of blocks");
    KP_CHECK(view.sizes[3] <= 1 || view.strides[3] == 1, "block_select: ", name, " has a last stride of ",
             view.strides[3], "; make it contiguous");
  }
  const TensorView &query = arguments.query, &key = arguments.key;
  KP_CHECK(query.sizes[0] == key.sizes[0] && query.sizes[3] == key.sizes[3], "block_select: query is ", query,
           ", key is ", key, "; they must have one batch and size");
  KP_CHECK(query.sizes[1] == 0 || (key.sizes[1] > 0 && query.sizes[1] % key.sizes[1] == 0), "block_select: query has ",
           query.sizes[1], " heads, key has ", key.sizes[1], "; the first must be a multiple of the second");
}

// Kept far from what 64 bits hold: places beyond 2^61 lie in columns beyond all blocks and local ones alike.
int64_t offset_of(const Select& arguments) {
  constexpr int64_t kFar = int64_t{1} << 61;
  return std::clamp(arguments.causal_offset.value_or(arguments.keys - arguments.queries), -kFar, kFar);
}

}  // namespace

void choose_share_of(Grid& grid, double sparsity) {
  choose_share(grid, sparsity, [&](const auto& of) {
    int64_t sum = 0;
    for (int32_t row = 0; row < grid.rows; ++row) sum += of(row_of(grid, row));
    return sum;
  });
}

Selection selection_of(const Select& arguments) {
  check_numbers(arguments);
  Selection selection{.given = arguments};
  selection.given.threshold = static_cast<float>(arguments.threshold);  // as every kernel compares it
  selection.grid = {.queries = arguments.queries,
                    .keys = arguments.keys,
                    .offset = offset_of(arguments),
                    .rows = static_cast<int32_t>(blocks_of(arguments.queries, arguments.query_block)),
                    .columns = static_cast<int32_t>(blocks_of(arguments.keys, arguments.key_block)),
                    .query_block = static_cast<int32_t>(arguments.query_block),
                    .key_block = static_cast<int32_t>(arguments.key_block),
                    .sinks = static_cast<int32_t>(std::min<int64_t>(arguments.sinks, 1 << 30)),
                    .local = static_cast<int32_t>(std::min<int64_t>(arguments.local, 1 << 30)),
                    .keep = 0,
                    .extra_from = 0,
                    .causal = arguments.causal};
  return selection;
}

int64_t columns_of(const Select& arguments) {
  check_numbers(arguments);
  return blocks_of(arguments.keys, arguments.key_block);
}

std::vector<Grid> grids_of(const Selection& selection) {
  const Select& given = selection.given;
  std::vector<Grid> grids(static_cast<size_t>(selection.batch()), selection.grid);
  if (!selection.has_lengths()) return grids;
  for (size_t i = 0; i < grids.size(); ++i) {
    grids[i] = grid_of_lengths(selection.grid, given.query_lengths.as<const int32_t>()[i],
                               given.key_lengths.as<const int32_t>()[i], !given.causal_offset.has_value());
    choose_share_of(grids[i], given.sparsity);
  }
  return grids;
}

void check(Selection& selection, Device device) {
  const ListCheck check{"block_select", device};
  const Select& arguments = selection.given;
  const Grid& grid = selection.grid;
  if (arguments.scores.is_present()) {
    check_scores(check, arguments, grid);
  } else {
    check_pooled(check, arguments, grid);
  }
  const TensorView& leader = arguments.scores.is_present() ? arguments.scores : arguments.query;
  TensorView shape =
      contiguous_view(nullptr, DType::kInt8, {leader.sizes[0], leader.sizes[1], grid.rows, grid.columns});
  KP_CHECK(arguments.query_lengths.is_present() == arguments.key_lengths.is_present(),
           "block_select: lengths are given for one of query and key; give both");
  for (const TensorView* lengths : {&arguments.query_lengths, &arguments.key_lengths}) {
    if (!lengths->is_present()) continue;
    check.check("lengths", *lengths, {leader.sizes[0]});
    KP_CHECK(lengths->dtype == DType::kInt32, "block_select: lengths are ", lengths->dtype, "; convert them to int32");
  }
  KP_CHECK(arguments.rows.is_present(), "block_select: rows, where the lists go, are missing");
  check.check_list("rows", arguments.rows, shape, grid.rows, grid.columns);
  if (arguments.map.is_present()) {
    check.check_map("map", arguments.map);
    check.check("map", arguments.map, {shape.sizes[0], shape.sizes[1], shape.sizes[2], shape.sizes[3]});
  }
  choose_share_of(selection.grid, arguments.sparsity);  // looks at every row: of shapes that are right
}

void select(const Select& arguments, Context& context) {
  Selection selection = selection_of(arguments);
  check(selection, context.device());
  registry::run_best(kSelect, selection, context);
}

void check(const Build& arguments, Device device) {
  const ListCheck check{"block_list", device};
  const TensorView& map = arguments.map;
  KP_CHECK(map.is_present(), "block_list: map is missing");
  check.check_map("map", map);
  check.check_list("rows", arguments.rows, map, map.sizes[2], map.sizes[3]);
  check.check_list("full_rows", arguments.full_rows, map, map.sizes[2], map.sizes[3]);
  check.check_list("columns", arguments.columns, map, map.sizes[3], map.sizes[2]);
  check.check_list("full_columns", arguments.full_columns, map, map.sizes[3], map.sizes[2]);
}

void build(const Build& arguments, Context& context) {
  check(arguments, context.device());
  registry::run_best(kBuild, arguments, context);
}

}  // namespace kernel_pytorch::block_list
