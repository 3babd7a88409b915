// What host and device agree on for rope.
#pragma once

#include "kernel_pytorch/ops/support/divider_cuda.h"

namespace kernel_pytorch::rope {

inline constexpr int kThreads = 256;  // of a block

// Strides in elements: of the batch, the token, the head; columns have stride 1 in the vector kernel.
struct HeadTensor {
  void* data;
  int64_t strides[4];
  int32_t heads;
};

// cos and sin by row, or inverse frequencies where cos is null. Strides in elements.
struct TableArguments {
  const void* cos;
  const void* sin;
  const float* inverse_frequencies;
  int64_t cos_strides[3], sin_strides[3];  // of the batch, the row, the pair
  int64_t rows;
  const void* positions;  // null: the place in the sequence
  int64_t position_strides[2];
  float scale;
  bool is_float;  // cos and sin; otherwise of the heads' type
  bool positions_are_64;
  bool inverse;
};

// A thread turns two vectors of 16 bytes that hold whole pairs, in several heads of one token; the first items of a
// head are pairs, the rest is copied.
struct VectorArguments {
  HeadTensor query, key, query_output, key_output;
  TableArguments table;
  Divider items_per_token, items_per_head, sequence;
  uint32_t items;        // in all
  int32_t query_groups;  // groups of heads before the key's
  int32_t pair_items;    // of a head
  int32_t pairs;         // of a head, in elements
  int32_t head_dim;
};

struct AnyArguments {
  HeadTensor query, key, query_output, key_output;
  TableArguments table;
  int64_t batch, sequence;
  int32_t head_dim, pairs;
  bool interleaved;
  bool copies_rest;
};

}  // namespace kernel_pytorch::rope
