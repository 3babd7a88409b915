// The keys that a query of DeepSeek's sparse attention reads: those with the highest scores of a small second
// attention.
//
//   score(t, s) = key_scale[s] * sum over heads of weights[t, h] * max(0, dot(query[t, h], key[s]))
//   indices[t]  = the top_k keys s <= t with the highest scores, of equal scores the smaller s; ascending, -1 behind
//                 the last where there are fewer
//
// Query i of entry b stands at key t = i + key_lengths[b] - queries; where t < 0 it sees nothing. Without key_lengths
// an entry has all keys; lengths are clamped to 0..keys. With block_tables keys lie in the pages of a cache, token s of
// entry b in row s % page_size of page block_tables[b, s / page_size], and indices are slots, page * page_size + row,
// as attention over latent rows takes them; order is then that of tokens. NaN is below all other scores. No scores are
// stored: a kernel keeps the best so far.
//
// Types: query and key fp32, bf16, fp16 or e4m3, both one; weights and key_scale fp32. A scale of the query is a factor
// of its weight. Sums are fp32 (double in the reference). There is no gradient. Sizes of 0 are legal.
#pragma once

#include "kernel_pytorch/base/export.h"
#include "kernel_pytorch/base/fields.h"
#include "kernel_pytorch/device/context.h"

namespace kernel_pytorch::lightning_indexer {

struct Index {
  TensorView query{};         // [batch, queries, heads, size], last stride 1
  TensorView key{};           // [batch, keys, size], or pages [pages, page_size, size]; last stride 1
  TensorView weights{};       // fp32 [batch, queries, heads]
  TensorView key_scale{};     // optional: fp32 [batch, keys] or [pages, page_size]
  TensorView key_lengths{};   // optional: int32 [batch], contiguous; needed with block_tables
  TensorView block_tables{};  // optional: int32 [batch, table], contiguous
  int64_t top_k = 2048;
  TensorView indices{};  // int32, contiguous
};
inline constexpr auto kIndexFields = fields<Index>(
    input<&Index::query>({.shape = "batch queries heads size",
                          .leads = true,
                          .bucketed = "batch queries",
                          .memory = MemoryLayout::kDenseLast}),
    input<&Index::key>(
        {.shape = "entries rows size", .dtype = "query", .memory = MemoryLayout::kDenseLast, .key = KeyPart::kSizes}),
    input<&Index::weights>({.shape = "batch queries heads", .dtype = "fp32"}),
    optional_input<&Index::key_scale>({.shape = "entries rows", .dtype = "fp32", .content = "positive"}),
    optional_input<&Index::key_lengths>({.shape = "batch", .dtype = "int32", .memory = MemoryLayout::kContiguous}),
    optional_input<&Index::block_tables>(
        {.shape = "batch table", .dtype = "int32", .memory = MemoryLayout::kContiguous, .key = KeyPart::kSizes}),
    option<&Index::top_k>({.key = KeyPart::kValue}),
    output<&Index::indices>({.shape = "batch queries top_k", .dtype = "int32"}));

// Throws Error{kInvalidArgument} naming the argument, both values and the cure. On the CPU a page outside the cache is
// an error; a GPU takes its keys for unseen.
KP_EXPORT void choose(const Index& arguments, Context& context);

}  // namespace kernel_pytorch::lightning_indexer
