// Attention of new tokens over keys and values that lie in pages of a cache, and the writing of such pages.
//
// A cache is [pages, page_size, key_heads, size] by any strides with a dense last dimension: pages of heads first, one
// tensor that holds keys and values in turns, or a slice of a larger pool need no copy. Key j of request r is row
// j % page_size of page block_tables[r, j / page_size]; a page of -1 is one that nobody sees. seq_lens[r] counts the
// request's keys, its new tokens included; it is clamped to what its table can name. Keys from there on are never read
// as numbers: what lies in the rest of a page may be NaN.
//
// attend: request r has the queries cu_seqlens_q[r] up to cu_seqlens_q[r + 1] of query [tokens, heads, size], or
// tokens / requests each without offsets. Query i of q stands at the position seq_lens[r] - q + i.
//   score(i, j) = scale * dot(query, key) * key_scale;  softcap c > 0: c * tanh(score / c);
//                 score -= slope * |j - position| (ALiBi)
//   kept(i, j)  = causal: j <= position; window (l, r): -l <= j - position <= r, -1 is unbounded;
//                 mask[r, i, j - (seq_lens[r] - q)] where j is one of the request's last q keys
//   lse, output as in attention/attention.h, with sinks counted once. Nothing kept: output 0, lse -inf (or the sink).
// Tokens past the last offset belong to nobody: output 0, lse -inf. Query heads are a multiple of key heads.
//
// attend_latent (MLA, after absorption): all heads share one key, a latent row followed by a rope row, and the latent
// row is its value too: score = scale * (dot(query[:value_size], latent) + dot(query[value_size:], rope)). The two
// caches may be views of one, [pages, page_size, 576]. Latent rows in e4m3 have a scale for each 128 columns: views of
// 656 bytes a token (512 codes, 4 scales, 64 numbers of rope). indices [tokens, top] in place of tables and lengths:
// token t sees the slots indices[t, i] = page * page_size + row alone, -1 is none.
//
// append: row t of key and value goes to slot slots[t] = page * page_size + row of its cache; -1 goes nowhere. With cos
// and sin the pairs of a key's first rotary_dim columns are turned first, as in rope/rope.h, by row positions[t] of the
// tables, or row t: first * cos - second * sin and second * cos + first * sin in fp32, the second product rounded, the
// sum by one FMA, so that every device writes the same bits. A cache in FP8 or int8 holds value / scale, to nearest
// even, saturated; rotation and scale are rounded to the cache's type once.
//
// Types: query, output and new keys fp32, bf16 or fp16; caches of that type, e4m3 or int8. Scales fp32: one, one of a
// key head, or one of a token and head, [pages, page_size, key_heads]. Sums and lse are fp32.
//
// Results do not depend on timing. With batch_invariant the bits of a request do not depend on the others.
#pragma once

#include <optional>

#include "kernel_pytorch/base/export.h"
#include "kernel_pytorch/base/fields.h"
#include "kernel_pytorch/device/context.h"

namespace kernel_pytorch::paged_attention {

struct Attend {
  TensorView query{};                     // [tokens, heads, size]
  TensorView key_cache{}, value_cache{};  // [pages, page_size, key_heads, size or value_size]
  TensorView block_tables{};              // int32 [requests, pages of a request]
  TensorView seq_lens{};                  // int32 [requests]
  TensorView cu_seqlens_q{};              // optional: int32 [requests + 1], ascending from 0
  TensorView plan{};                      // optional: of plan_decode, for these lengths, heads and windows
  TensorView mask{};                      // optional: bool [requests, queries, queries], true keeps
  TensorView sinks{}, alibi_slopes{};     // optional: fp32 [heads]
  TensorView key_scale{}, value_scale{};  // optional, see above
  bool causal = true;
  std::optional<double> scale{};  // none: size ** -0.5
  double softcap = 0;             // 0: none
  int64_t window_left = -1, window_right = -1;
  int64_t max_seqlen_q = 0;  // with cu_seqlens_q: no request has more queries; 0: all tokens
  bool batch_invariant = false;
  TensorView output{};  // [tokens, heads, value_size], dense last dimension
  TensorView lse{};     // optional: fp32 [heads, tokens], contiguous
};

inline constexpr auto kAttendFields = fields<Attend>(
    input<&Attend::query>({.shape = "tokens heads size", .leads = true, .memory = MemoryLayout::kDenseLast}),
    input<&Attend::key_cache>(
        {.shape = "pages page_size key_heads size", .memory = MemoryLayout::kDenseLast, .key = KeyPart::kSizes}),
    input<&Attend::value_cache>(
        {.shape = "pages page_size key_heads value_size", .memory = MemoryLayout::kDenseLast, .key = KeyPart::kSizes}),
    input<&Attend::block_tables>(
        {.shape = "requests table", .dtype = "int32", .memory = MemoryLayout::kContiguous, .key = KeyPart::kSizes}),
    input<&Attend::seq_lens>({.shape = "requests", .dtype = "int32", .memory = MemoryLayout::kContiguous}),
    optional_input<&Attend::cu_seqlens_q>({.dtype = "int32", .memory = MemoryLayout::kContiguous}),
    optional_input<&Attend::plan>({.dtype = "int32", .memory = MemoryLayout::kContiguous}),
    optional_input<&Attend::mask>({.shape = "requests queries queries", .dtype = "bool"}),
    optional_input<&Attend::sinks>({.shape = "heads", .dtype = "fp32", .memory = MemoryLayout::kContiguous}),
    optional_input<&Attend::alibi_slopes>({.shape = "heads", .dtype = "fp32", .memory = MemoryLayout::kContiguous}),
    optional_input<&Attend::key_scale>({.dtype = "fp32", .content = "positive"}),
    optional_input<&Attend::value_scale>({.dtype = "fp32", .content = "positive"}),
    option<&Attend::causal>({.key = KeyPart::kValue}), option<&Attend::scale>(),
    option<&Attend::softcap>({.key = KeyPart::kPresence}), option<&Attend::window_left>(),
    option<&Attend::window_right>(), option<&Attend::max_seqlen_q>({.symbolic = true}),
    option<&Attend::batch_invariant>({.key = KeyPart::kValue}),
    output<&Attend::output>({.shape = "tokens heads value_size", .dtype = "query"}),
    output<&Attend::lse>(
        {.shape = "heads tokens", .dtype = "fp32", .wanted = "return_lse", .optional = true, .trial = "lse"}));

struct Latent {
  TensorView query{};                     // [tokens, heads, value_size + rope_size]
  TensorView latent_cache{};              // [pages, page_size, value_size]
  TensorView rope_cache{};                // [pages, page_size, rope_size], the query's type
  TensorView latent_scale{};              // with latent_cache in e4m3: fp32 [pages, page_size, value_size / 128]
  TensorView block_tables{}, seq_lens{};  // as in Attend; absent with indices
  TensorView cu_seqlens_q{};              // optional, as in Attend
  TensorView indices{};                   // optional: int32 [tokens, top]
  bool causal = true;
  std::optional<double> scale{};  // none: (value_size + rope_size) ** -0.5
  int64_t max_seqlen_q = 0;
  bool batch_invariant = false;
  TensorView output{};  // [tokens, heads, value_size], dense last dimension
  TensorView lse{};     // optional: fp32 [heads, tokens], contiguous
};

inline constexpr auto kLatentFields = fields<Latent>(
    input<&Latent::query>({.shape = "tokens heads size", .leads = true, .memory = MemoryLayout::kDenseLast}),
    input<&Latent::latent_cache>(
        {.shape = "pages page_size value_size", .memory = MemoryLayout::kDenseLast, .key = KeyPart::kSizes}),
    input<&Latent::rope_cache>(
        {.shape = "pages page_size rope_size", .memory = MemoryLayout::kDenseLast, .key = KeyPart::kSizes}),
    optional_input<&Latent::latent_scale>({.dtype = "fp32", .content = "positive"}),
    optional_input<&Latent::block_tables>(
        {.shape = "requests table", .dtype = "int32", .memory = MemoryLayout::kContiguous, .key = KeyPart::kSizes}),
    optional_input<&Latent::seq_lens>({.shape = "requests", .dtype = "int32", .memory = MemoryLayout::kContiguous}),
    optional_input<&Latent::cu_seqlens_q>({.dtype = "int32", .memory = MemoryLayout::kContiguous}),
    optional_input<&Latent::indices>(
        {.shape = "tokens top", .dtype = "int32", .memory = MemoryLayout::kContiguous, .key = KeyPart::kSizes}),
    option<&Latent::causal>({.key = KeyPart::kValue}), option<&Latent::scale>(),
    option<&Latent::max_seqlen_q>({.symbolic = true}), option<&Latent::batch_invariant>({.key = KeyPart::kValue}),
    output<&Latent::output>({.shape = "tokens heads value_size", .dtype = "query"}),
    output<&Latent::lse>({.shape = "heads tokens", .dtype = "fp32", .wanted = "return_lse", .trial = "lse"}));

struct Append {
  TensorView key{}, value{};              // [tokens, key_heads, size or value_size]
  TensorView slots{};                     // int64 or int32 [tokens]
  TensorView key_scale{}, value_scale{};  // optional
  TensorView cos{}, sin{};                // optional: [rows, rotary_dim or half of it], fp32 or the key's type
  TensorView positions{};                 // optional: int64 or int32 [tokens], rows of cos and sin
  int64_t rotary_dim = 0;                 // 0: from the tables' width, as in rope
  bool interleaved = false;               // pairs are neighbours, not half of rotary_dim apart
  TensorView key_cache{}, value_cache{};  // [pages, page_size, key_heads, size or value_size]
};

inline constexpr auto kAppendFields = fields<Append>(
    input<&Append::key>({.shape = "tokens key_heads size", .leads = true, .memory = MemoryLayout::kDenseLast}),
    input<&Append::value>({.shape = "tokens key_heads value_size", .memory = MemoryLayout::kDenseLast}),
    input<&Append::slots>({.shape = "tokens", .memory = MemoryLayout::kContiguous, .trial_dtype = "slots"}),
    optional_input<&Append::key_scale>({.dtype = "fp32", .content = "positive"}),
    optional_input<&Append::value_scale>({.dtype = "fp32", .content = "positive"}),
    optional_input<&Append::cos>({.memory = MemoryLayout::kDenseLast}),
    optional_input<&Append::sin>({.memory = MemoryLayout::kDenseLast}),
    optional_input<&Append::positions>({.shape = "tokens", .memory = MemoryLayout::kContiguous}),
    option<&Append::rotary_dim>(), option<&Append::interleaved>({.key = KeyPart::kValue}),
    updated<&Append::key_cache>({.shape = "pages page_size key_heads size", .memory = MemoryLayout::kDenseLast}),
    updated<&Append::value_cache>(
        {.shape = "pages page_size key_heads value_size", .memory = MemoryLayout::kDenseLast}));

// How the keys of a step's requests are shared out, computed where the lengths are: one array of fixed capacity for all
// layers of a model and, written in place, for all steps. The numbers are described in plan/plan_cuda.h. With 0
// unit_keys, tile_rows and tile_heads are the device's own. A CPU cuts requests as the plan says and refuses a plan of
// other lengths; the kernels of a GPU share out keys inside their launches, and do not read it.
struct PlanDecode {
  TensorView seq_lens{};      // int32 [requests]
  TensorView cu_seqlens_q{};  // optional: int32 [requests + 1]
  int64_t heads = 0, key_heads = 0;
  int64_t queries = 1;  // of each request, without cu_seqlens_q
  bool causal = true;
  int64_t window_left = -1, window_right = -1;
  bool batch_invariant = false;  // units do not depend on the other requests
  int64_t most_keys = 0;         // of a request: what its table can name; 0: any
  int64_t unit_keys = 0, tile_rows = 0, tile_heads = 0;
  int64_t capacity = 0;  // numbers of the plan: at least 9 and one for each request
  TensorView plan{};     // int32 [capacity]
};

inline constexpr auto kPlanFields = fields<PlanDecode>(
    input<&PlanDecode::seq_lens>(
        {.shape = "requests", .leads = true, .dtype = "int32", .memory = MemoryLayout::kContiguous}),
    optional_input<&PlanDecode::cu_seqlens_q>({.dtype = "int32", .memory = MemoryLayout::kContiguous}),
    option<&PlanDecode::heads>(), option<&PlanDecode::key_heads>(), option<&PlanDecode::queries>({.symbolic = true}),
    option<&PlanDecode::causal>(), option<&PlanDecode::window_left>(), option<&PlanDecode::window_right>(),
    option<&PlanDecode::batch_invariant>(), option<&PlanDecode::most_keys>({.symbolic = true}),
    option<&PlanDecode::unit_keys>(), option<&PlanDecode::tile_rows>(), option<&PlanDecode::tile_heads>(),
    option<&PlanDecode::capacity>({.symbolic = true}),
    output<&PlanDecode::plan>({.shape = "capacity", .dtype = "int32"}));

// Throw Error{kInvalidArgument} naming the argument, both values and the cure. On the CPU a page or slot outside the
// cache is an error; a GPU takes it for -1. A position without a row is an error on the CPU and gives NaN on a GPU.
KP_EXPORT void attend(const Attend& arguments, Context& context);
KP_EXPORT void attend_latent(const Latent& arguments, Context& context);
KP_EXPORT void plan_decode(const PlanDecode& arguments, Context& context);
KP_EXPORT void append(const Append& arguments, Context& context);

}  // namespace kernel_pytorch::paged_attention
