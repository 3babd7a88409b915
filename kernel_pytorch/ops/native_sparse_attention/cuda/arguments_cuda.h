// What host and device agree on: where tensors lie, the numbers of the op, and what of shared memory a kernel needs.
#pragma once

#include "kernel_pytorch/base/fixed_width.h"

namespace kernel_pytorch::native_sparse_attention {

inline constexpr int kThreads = 128;
inline constexpr int kBlocks = 4;  // of a multiprocessor at least: left to itself the assembler spills at 40 registers
inline constexpr int kChunk = kThreads;  // rows of keys that are scored at once, one for each thread
inline constexpr int kTileRows = 32;     // of a block of threads that gathers the gradients of keys
inline constexpr int kBranches = 3;      // compressed, selected, window

// Strides in elements.
struct Rows {
  const void* data;
  int64_t batch, token, head;
};
struct Gate {
  const void* data;  // null: no such branch
  int64_t batch, token, head;
  bool is_float;  // else of the query's type
};
struct Arguments {
  Rows query, key, value, grad_output;
  Rows compressed_key, compressed_value;
  Gate gates[kBranches];
  const int32_t* lists;  // [batch, queries, key_heads, list_length]; null where they are chosen
  const void* offsets;   // of packed sequences, or null
  bool offsets_are_wide, chooses;
  int32_t sequences, batch, queries, keys, heads, key_heads, group, size, value_size;
  int32_t compressed;  // rows of an entry of the batch
  int32_t list_length, block_size, window, compress_block, compress_stride, first_blocks, local_blocks, key_blocks;
  float scale;
  float* lse[kBranches];  // read by the backward; each null where it is not wanted
  // Results
  Rows output;        // contiguous
  int32_t* selected;  // or null; selected_length entries a list
  int32_t selected_length;
  Rows means_of_key, means_of_value;  // float
  Rows grad_query, grad_key, grad_value;
  Rows grad_compressed_key, grad_compressed_value;  // data null: not wanted
  bool adds_means;                                  // what reached compressed rows goes on to keys
  Gate grad_gates[kBranches];
  float* deltas[kBranches];  // [batch, heads, queries]
};

// Floats of shared memory. Forward: queries, the output, a branch's sums and scores, most, mass and factor of each
// head, rows of a chunk, a list, importance, scores of blocks.
KP_SHARED_CODE constexpr int64_t forward_floats(const Arguments& a) {
  return int64_t{a.group} * (a.size + 2 * a.value_size + kChunk + 3) + 2 * kChunk + a.list_length +
         (a.chooses ? a.key_blocks : 0);
}
// Queries, their gradients, gradients of the output, scores and differences, a sum of each head, rows.
KP_SHARED_CODE constexpr int64_t backward_floats(const Arguments& a) {
  return int64_t{a.group} * (2 * a.size + a.value_size + 2 * kChunk + 1) + kChunk;
}
// A tile of keys and values, their gradients, shares and differences of a few heads, times of each row.
inline constexpr int kTileHeads = kThreads / kTileRows;
KP_SHARED_CODE constexpr int64_t tile_floats(const Arguments& a) {
  return int64_t{2} * kTileRows * (a.size + a.value_size) + 2 * kTileHeads * kTileRows + 2 * kTileRows;
}

}  // namespace kernel_pytorch::native_sparse_attention
