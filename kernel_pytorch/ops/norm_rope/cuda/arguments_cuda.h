// What host and device agree on for norm_rope.
#pragma once

#include "kernel_pytorch/base/fixed_width.h"
#include "kernel_pytorch/ops/support/divider_cuda.h"

namespace kernel_pytorch::norm_rope {

inline constexpr int kThreads = 128;  // of a block

// What is compiled: one kernel for each value. A head lies over `lanes` threads of a warp; each holds one vector of the
// first halves of the pairs, its partner, and, with `rest`, up to two of the columns that are not turned.
struct HeadConfig {
  int lanes = 8;  // a power of two
  int heads = 1;  // of a token that a group of lanes takes together, with one load of cos, sin and weight
  bool rest = false;
};

KP_SHARED_CODE constexpr bool is_legal(const HeadConfig& config) {
  return config.lanes >= 4 && config.lanes <= 32 && (config.lanes & (config.lanes - 1)) == 0 && config.heads >= 1 &&
         config.heads <= 4;
}

// Strides in bytes: of the batch, the token, the head.
struct HeadTensor {
  void* data;  // null: absent
  int64_t strides[3];
};

// Strides in bytes: of the batch, the place in the sequence.
struct Table {
  const void* data;
  int64_t strides[2];
};

struct Arguments {
  HeadTensor x, grad_output, output;  // output: grad_x in backward
  Table cos, sin;
  const void* weight;     // null: ones
  float* weight_partial;  // [blocks, head_dim]; null: not wanted
  Divider head_groups;    // of a token
  Divider sequence;
  uint32_t items;  // groups of heads in all
  int32_t heads, pairs, head_dim;
  float eps, weight_offset;
  bool weight_is_float, table_is_float;  // or of x's type
};

}  // namespace kernel_pytorch::norm_rope
