// Attention over all keys from attention over two parts of them: of a prefix that requests share, and of each one's own
// keys.
//   lse = log(exp(lse1) + exp(lse2));  output = output1 * exp(lse1 - lse) + output2 * exp(lse2 - lse)
// Logarithms are natural. A part whose lse is -inf saw no key: its output is not read as numbers, it may be NaN. Where
// both are, output is 0 and lse -inf. A sink belongs to one of the parts.
//
// Types: outputs fp32, bf16 or fp16, [tokens, heads, size] by any strides with a dense last dimension; lse fp32,
// [heads, tokens] by any strides. The sum is fp32 and rounded once. The result may be the memory of either part.
#pragma once

#include "kernel_pytorch/base/export.h"
#include "kernel_pytorch/base/fields.h"
#include "kernel_pytorch/device/context.h"

namespace kernel_pytorch::merge_attention {

struct Merge {
  TensorView output1{}, lse1{};
  TensorView output2{}, lse2{};
  TensorView output{};  // [tokens, heads, size]
  TensorView lse{};     // optional: [heads, tokens]
};

inline constexpr auto kMergeFields = fields<Merge>(
    input<&Merge::output1>({.shape = "tokens heads size", .leads = true, .memory = MemoryLayout::kDenseLast}),
    input<&Merge::lse1>({.shape = "heads tokens", .dtype = "fp32"}),
    input<&Merge::output2>({.shape = "tokens heads size", .dtype = "output1", .memory = MemoryLayout::kDenseLast}),
    input<&Merge::lse2>({.shape = "heads tokens", .dtype = "fp32"}),
    output<&Merge::output>({.shape = "tokens heads size", .dtype = "output1"}),
    output<&Merge::lse>({.shape = "heads tokens", .dtype = "fp32", .wanted = "return_lse", .trial = "lse"}));

// Throws Error{kInvalidArgument} naming the argument, both values and the cure.
KP_EXPORT void merge(const Merge& arguments, Context& context);

}  // namespace kernel_pytorch::merge_attention
