// The next token of each row of logits: temperature, top-k, top-p and min-p, then one draw, in one op.
//
// A token has the weight w = floor(2^36 * 2^((logit - largest) * log2(e) / temperature)) of fixed point, at most
// 2^36 - 1 (weight_cuda.h), so that sums are integers: no order of additions, device or thread changes a token.
//   top_k = k > 0      keeps the logits that are not below the k-th largest; equal ones stay together
//   top_p = p < 1      of these keeps a logit while the weights of all larger ones are below p of the total
//   min_p = m > 0      of these keeps w >= m * 2^36, m in (0, 1]
// The token is the first, in the order of the vocabulary, at which the kept weights add up to more than
// floor(total * u / 2^64), u being the first two words (low word first) of Philox block 0 with the row's seed as key
// and its position as offset (base/philox.h). A row's token depends on nothing but its own logits, numbers, seed and
// position. Tokens less likely than 2^-36 of the largest are not drawn.
//
// temperature at or below 1e-30, or NaN: the largest logit, the first of equal ones; above 1e30 it is 1e30. NaN and
// -inf are never chosen, +inf is the largest finite number; a row of nothing else has the token -1. Absent numbers:
// temperature 1, no limits, seed and position 0. Values out of range switch their limit off (min_p above 1 is 1).
//
// Types: logits fp32, bf16 or fp16, [rows, vocabulary] with dense rows and at most 2^20 tokens; numbers fp32, top_k
// int32, seeds and positions int64 or int32, one of each row, contiguous; tokens int32.
#pragma once

#include "kernel_pytorch/base/export.h"
#include "kernel_pytorch/base/fields.h"
#include "kernel_pytorch/device/context.h"

namespace kernel_pytorch::sample {

struct Draw {
  TensorView logits{};                                  // [rows, vocabulary]
  TensorView temperature{}, top_k{}, top_p{}, min_p{};  // optional [rows]
  TensorView seeds{}, positions{};                      // optional [rows]
  TensorView tokens{};                                  // [rows]
};

inline constexpr auto kDrawFields = fields<Draw>(
    input<&Draw::logits>({.shape = "rows vocabulary", .leads = true, .memory = MemoryLayout::kDenseLast}),
    optional_input<&Draw::temperature>(
        {.shape = "rows", .dtype = "fp32", .memory = MemoryLayout::kContiguous, .usual = true, .content = "positive"}),
    optional_input<&Draw::top_k>(
        {.shape = "rows", .dtype = "int32", .memory = MemoryLayout::kContiguous, .content = "indices 40"}),
    optional_input<&Draw::top_p>({.shape = "rows", .dtype = "fp32", .memory = MemoryLayout::kContiguous}),
    optional_input<&Draw::min_p>({.shape = "rows", .dtype = "fp32", .memory = MemoryLayout::kContiguous}),
    optional_input<&Draw::seeds>(
        {.shape = "rows", .memory = MemoryLayout::kContiguous, .usual = true, .content = "seeds"}),
    optional_input<&Draw::positions>({.shape = "rows", .memory = MemoryLayout::kContiguous, .content = "indices 1000"}),
    output<&Draw::tokens>({.shape = "rows", .dtype = "int32"}));

inline constexpr int64_t kMostTokens = int64_t{1} << 20;  // of a vocabulary

// Throws Error{kInvalidArgument} naming the argument, both values and the cure.
KP_EXPORT void draw(const Draw& arguments, Context& context);

}  // namespace kernel_pytorch::sample
