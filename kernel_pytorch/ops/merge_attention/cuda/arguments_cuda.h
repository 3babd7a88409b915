// What host and device agree on: a warp takes a head of a token.
#pragma once

#include "kernel_pytorch/base/fixed_width.h"

namespace kernel_pytorch::merge_attention {

inline constexpr int kThreads = 256, kWarps = kThreads / 32;

struct Rows {
  const void* data;
  int64_t token_stride, head_stride;
};
struct Sums {
  const float* data;  // or null, of the result
  int64_t head_stride, token_stride;
};
struct MergeArguments {
  Rows first, second, output;
  Sums first_lse, second_lse, lse;
  int64_t rows;  // heads of all tokens
  int32_t heads, size;
  bool is_aligned;  // rows may be taken 16 bytes at a time
};

}  // namespace kernel_pytorch::merge_attention
