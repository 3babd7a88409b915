// Attention forward with both products in FP8 (e4m3): queries, keys and values are rounded on the way.
//
//   round(x)     = scale * e4m3(x / scale), one scale for 128 rows of a head, the least power of two by which they fit
//   score(q, k)  = softmax scale * dot(round(query)[q], round(key)[k]), with `rotate` of query and key times one random
//                  orthogonal matrix (signs and a Hadamard matrix): products stay, outliers are spread before rounding
//   output[q]    = sum over kept k of probability(q, k) * round(value)[k], where kernels may round probabilities to
//   e4m3 lse(q)       = log(sum over kept k of exp(score))                                            natural logarithm
//
// kept, causal, window, heads and layouts are those of attention.h: aligned bottom-right, rows with nothing kept give 0
// and -inf. Types: fp32, bf16 and fp16. size and value_size are at most 256, of any strides with a dense last
// dimension. Infinite elements become the largest code; NaN stays NaN. Empty tensors are legal. No gradient.
//
// Sums: products of FP8 leave the tensor core (about 14 bits) every 128 keys and are added in fp32.
#pragma once

#include <optional>

#include "kernel_pytorch/base/export.h"
#include "kernel_pytorch/base/fields.h"
#include "kernel_pytorch/base/tensor_view.h"
#include "kernel_pytorch/device/context.h"

namespace kernel_pytorch::attention::fp8 {

struct Forward {
  TensorView query{}, key{}, value{};
  bool heads_first = true;
  std::optional<double> scale{};  // none: size ** -0.5
  bool causal = false;
  int64_t window_left = -1, window_right = -1;
  bool rotate = false;
  TensorView output{};  // query's layout and type, value's size; any strides, dense last dimension
  TensorView lse{};     // optional: fp32 [batch, heads, queries], contiguous
};

inline constexpr auto kForwardFields = fields<Forward>(
    input<&Forward::query>({.shape = "batch heads queries size | batch queries heads size",
                            .shape_by = "heads_first",
                            .leads = true,
                            .bucketed = "queries",
                            .memory = MemoryLayout::kDenseLast}),
    input<&Forward::key>({.shape = "batch key_heads keys size | batch keys key_heads size",
                          .shape_by = "heads_first",
                          .memory = MemoryLayout::kDenseLast,
                          .key = KeyPart::kSizes}),
    input<&Forward::value>({.shape = "batch key_heads keys value_size | batch keys key_heads value_size",
                            .shape_by = "heads_first",
                            .memory = MemoryLayout::kDenseLast,
                            .key = KeyPart::kSizes}),
    option<&Forward::heads_first>(), option<&Forward::scale>(), option<&Forward::causal>({.key = KeyPart::kValue}),
    option<&Forward::window_left>({.key = KeyPart::kValue}), option<&Forward::window_right>({.key = KeyPart::kValue}),
    option<&Forward::rotate>({.key = KeyPart::kValue}),
    output<&Forward::output>({.shape = "batch heads queries value_size | batch queries heads value_size",
                              .shape_by = "heads_first",
                              .order_of = "query",
                              .dtype = "query"}),
    saved<&Forward::lse>({.shape = "batch heads queries", .dtype = "statistic query", .wanted = "return_lse"}));

// Throws Error{kInvalidArgument} naming the argument, both values and the cure.
KP_EXPORT void forward(const Forward& arguments, Context& context);

}  // namespace kernel_pytorch::attention::fp8
