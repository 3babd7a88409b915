// What host and device agree on for attention in fp64 on CUDA: the tile and the arguments, all in double.
#pragma once

#include "kernel_pytorch/ops/attention/cuda/arguments_cuda.h"

namespace kernel_pytorch::attention {

// A warp has 16 rows (queries, or for gradients of keys and values keys) and walks over `columns` of the others at a
// time; head sizes up to `size`.
struct DoubleTile {
  int size = 64;
  int warps = 4;
  int columns = 16;
};
KP_SHARED_CODE constexpr int double_rows(DoubleTile tile) {
  return 16 * tile.warps;
}
KP_SHARED_CODE constexpr int double_pitch(DoubleTile tile) {  // four lines are in different banks
  return tile.size + 4;
}
// Forward: queries, keys and values. Backward: two operands with rows and two with columns.
KP_SHARED_CODE constexpr int double_forward_bytes(DoubleTile tile) {
  return (double_rows(tile) + 2 * tile.columns) * double_pitch(tile) * 8;
}
KP_SHARED_CODE constexpr int double_backward_bytes(DoubleTile tile) {
  return 2 * (double_rows(tile) + tile.columns) * double_pitch(tile) * 8;
}
KP_SHARED_CODE constexpr bool is_legal(DoubleTile tile) {
  return (tile.size == 64 || tile.size == 128) && tile.warps >= 1 && tile.warps <= 8 && tile.columns % 16 == 0;
}

// What a launch of the backward computes; each is deterministic, since a warp owns its rows.
enum class DoubleOf : uint8_t { kQueries, kKeys, kValues };

struct DoubleArguments {
  RowTensor query, key, value, output, grad_output, result;  // result: the gradient that is computed
  double* lse;                                               // [batch, heads, queries]; null: not wanted
  double* delta;                                             // the same, of the backward
  const double* grad_lse;                                    // the same, or null
  int32_t batches, heads, group;                             // group: query heads that share a key head
  int32_t queries, keys, size, value_size;
  int64_t left, right;  // kept: -left <= k - q - offset <= right
  int64_t offset;       // where `has_offset`; else aligned_offset
  bool has_offset;
  bool softcap_after;  // bias and ALiBi
  double scale, softcap;
  ScoreTensor bias, mask, alibi_slopes;  // alibi_slopes: batch and head only; data null: absent
  const double* sinks;                   // [heads]; null: absent
  int64_t sinks_stride;
  const int32_t* query_ids;  // null: absent
  const int32_t* key_ids;
  int64_t query_ids_batch, query_ids_row, key_ids_batch, key_ids_row;
  const int32_t* key_lengths;  // null: absent
  int64_t key_lengths_stride;
};

}  // namespace kernel_pytorch::attention
