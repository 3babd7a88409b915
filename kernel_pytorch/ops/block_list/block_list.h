// Which tiles of attention's scores to compute: lists of blocks, made on the device that reads them.
//
// build    map [batch, heads, rows, columns]: 0 empty, 1 partial, 2 full (bool: partial where true)
//          -> for each row the columns of its partial blocks, ascending, and how many; the same of its full blocks; the
//             same transposed, for each column its rows, which attention's backward reads. A row may be empty.
// select   pooled queries and keys, or scores -> the blocks that each row keeps, as a list and as a map
//
// A row of blocks is `query_block` queries, a column `key_block` keys; query q stands at key q + offset. Under
// causality a row sees the columns up to the place of its last query, otherwise all. It always keeps its diagonal (the
// columns of its own places), `local` more before it (without causality on both sides) and the first `sinks`; of the
// others it keeps those with the highest scores, none below `threshold`, until it has its share. The share is the same
// number for all rows, so that short rows lose nothing, one more from some row on: the largest with which `sparsity` of
// the blocks that causality leaves are skipped, or as many as what is always kept allows.
//   score(row, column) = max over the parts of the column of dot(mean query of the row, mean key of the part)
// A column is cut into `key_parts` means: one key that matters is not lost among a block's others. Of equal scores the
// lower column goes first; NaN counts as the lowest score. Sums are fp32 (double in the reference). Types of pooled
// tensors: fp32, bf16, fp16, and fp64 on the CPU. Entries of a list behind its count are 0. Sizes of 0 are legal.
//
// Sequences of several lengths: entry i of the batch has query_lengths[i] queries and key_lengths[i] keys, clamped to
// `queries` and `keys`, is aligned at its end and has a share of its own, as if it were alone; rows past it are empty.
#pragma once

#include <limits>
#include <optional>

#include "kernel_pytorch/base/export.h"
#include "kernel_pytorch/base/fields.h"
#include "kernel_pytorch/device/context.h"

namespace kernel_pytorch::block_list {

// int32, contiguous: [batch, heads, lists] and [batch, heads, lists, n]; both or neither.
struct List {
  TensorView counts{}, blocks{};

  bool is_present() const { return counts.is_present() || blocks.is_present(); }
};

struct Build {
  TensorView map{};                // int8 or bool, contiguous
  List rows{}, full_rows{};        // each optional: of each row the columns
  List columns{}, full_columns{};  // of each column the rows
};
inline constexpr auto kRowLists = field_group<List>(
    output<&List::counts>({.name = "row_counts", .shape = "batch heads n", .dtype = "int32", .wanted = "rows"}),
    output<&List::blocks>({.name = "row_blocks", .shape = "batch heads n m", .dtype = "int32", .wanted = "rows"}));
inline constexpr auto kColumnLists = field_group<List>(
    output<&List::counts>({.name = "column_counts", .shape = "batch heads m", .dtype = "int32", .wanted = "columns"}),
    output<&List::blocks>(
        {.name = "column_blocks", .shape = "batch heads m n", .dtype = "int32", .wanted = "columns"}));
inline constexpr auto kFullRowLists = field_group<List>(
    output<&List::counts>(
        {.name = "full_row_counts", .shape = "batch heads n", .dtype = "int32", .wanted = "rows full"}),
    output<&List::blocks>(
        {.name = "full_row_blocks", .shape = "batch heads n m", .dtype = "int32", .wanted = "rows full"}));
inline constexpr auto kFullColumnLists = field_group<List>(
    output<&List::counts>(
        {.name = "full_column_counts", .shape = "batch heads m", .dtype = "int32", .wanted = "columns full"}),
    output<&List::blocks>(
        {.name = "full_column_blocks", .shape = "batch heads m n", .dtype = "int32", .wanted = "columns full"}));
inline constexpr auto kBuildFields =
    fields<Build>(input<&Build::map>({.shape = "batch heads n m",
                                      .leads = true,
                                      .bucketed = "batch heads n m",
                                      .memory = MemoryLayout::kContiguous,
                                      .content = "indices 3"}),
                  all_of<&Build::rows, kRowLists>(), all_of<&Build::columns, kColumnLists>(),
                  all_of<&Build::full_rows, kFullRowLists>(), all_of<&Build::full_columns, kFullColumnLists>());

struct Select {
  // Means of queries and keys: [batch, heads, rows, size], [batch, key heads, keys / part rounded up, size], where a
  // part is key_block / key_parts keys; dense last dimension. Query head h reads key head h / (heads / key heads).
  TensorView query{}, key{};
  TensorView scores{};  // instead of them: fp32 [batch, heads, rows, columns], strides 0 where broadcast
  TensorView query_lengths{}, key_lengths{};  // optional: int32 [batch], contiguous; both or neither
  int64_t queries = 0, keys = 0;              // tokens
  int64_t query_block = 0, key_block = 0, key_parts = 1;
  bool causal = false;
  std::optional<int64_t> causal_offset{};  // none: keys - queries
  double sparsity = 0;                     // of 0 to 1
  double threshold = -std::numeric_limits<double>::infinity();
  int64_t sinks = 1, local = 1;
  List rows{};       // [batch, heads, rows(, columns)]
  TensorView map{};  // optional: int8 or bool [batch, heads, rows, columns], 1 where kept
};
inline constexpr auto kSelectedRows =
    field_group<List>(output<&List::counts>({.shape = "batch heads rows", .dtype = "int32"}),
                      output<&List::blocks>({.shape = "batch heads rows ceil(keys/key_block)",
                                             .leads = true,
                                             .bucketed = "batch heads rows ceil(keys/key_block)",
                                             .dtype = "int32"}));
inline constexpr auto kSelectFields = fields<Select>(
    optional_input<&Select::query>({.shape = "batch heads rows size", .memory = MemoryLayout::kDenseLast}),
    optional_input<&Select::key>({.shape = "batch key_heads parts size", .memory = MemoryLayout::kDenseLast}),
    optional_input<&Select::scores>({.shape = "batch heads rows columns"}),
    optional_input<&Select::query_lengths>({.shape = "batch", .memory = MemoryLayout::kContiguous}),
    optional_input<&Select::key_lengths>({.shape = "batch", .memory = MemoryLayout::kContiguous}),
    option<&Select::queries>({.symbolic = true}), option<&Select::keys>({.symbolic = true}),
    option<&Select::query_block>({.key = KeyPart::kValue}), option<&Select::key_block>({.key = KeyPart::kValue}),
    option<&Select::key_parts>({.key = KeyPart::kValue}), option<&Select::causal>({.key = KeyPart::kValue}),
    option<&Select::causal_offset>({.symbolic = true}), option<&Select::sparsity>(), option<&Select::threshold>(),
    option<&Select::sinks>(), option<&Select::local>(), all_of<&Select::rows, kSelectedRows>(),
    output<&Select::map>({.shape = "batch heads rows ceil(keys/key_block)", .dtype = "bool", .wanted = "with_map"}));

// Sizes of a block of queries or keys; at most this.
inline constexpr int64_t kLargestBlock = int64_t{1} << 30;

// Throw Error{kInvalidArgument} naming the argument, both values and the cure.
KP_EXPORT void build(const Build& arguments, Context& context);
KP_EXPORT void select(const Select& arguments, Context& context);
// How many columns of blocks a selection has, of checked numbers.
KP_EXPORT int64_t columns_of(const Select& arguments);

}  // namespace kernel_pytorch::block_list
