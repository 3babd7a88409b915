// What host and device agree on for the kernels on mma: tiles, and the arguments of each kernel.
#pragma once

#include "kernel_pytorch/ops/attention/cuda/arguments_cuda.h"

namespace kernel_pytorch::attention {

// One kernel is compiled for each value. A block keeps warps * row_blocks * 16 rows of one operand (queries, or keys
// for their gradients) and steps over `columns` rows of the other.
struct MmaTile {
  int size = 64;  // columns of query and key, and of value: real ones are filled up with zeros
  int value_size = 64;
  int slice = 64;  // columns of the results that a block computes: more would not fit its registers
  int warps = 4;
  int row_blocks = 1;  // of 16 rows each, that a warp holds
  int columns = 32;
  int stages = 2;  // tiles of the walk in shared memory
  int bytes = 2;   // of an element
};

KP_SHARED_CODE constexpr int rows_of(MmaTile tile) {
  return tile.warps * tile.row_blocks * 16;
}
// A row in shared memory: 16 bytes more than its elements, so that eight rows at one column lie in eight banks.
KP_SHARED_CODE constexpr int pitch_bytes(int columns, int bytes) {
  return columns * bytes + 16;
}
KP_SHARED_CODE constexpr int query_pitch(MmaTile tile) {
  return pitch_bytes(tile.size, tile.bytes);
}
KP_SHARED_CODE constexpr int value_pitch(MmaTile tile) {
  return pitch_bytes(tile.value_size, tile.bytes);
}
KP_SHARED_CODE constexpr int slices_of(int columns, int slice) {
  return (columns + slice - 1) / slice;
}
KP_SHARED_CODE constexpr int forward_shared_bytes(MmaTile tile) {
  return rows_of(tile) * query_pitch(tile) +
         tile.stages * tile.columns * (query_pitch(tile) + pitch_bytes(tile.slice, tile.bytes));
}

struct MmaForwardArguments {
  ScoreArguments scores;
  RowTensor query, key, value, output;
  float* lse;  // null: not wanted
  int32_t size, value_size;
  int32_t tiles;          // of the longest sequence's queries
  const int32_t* places;  // of tiles with lists, in the order in which they are taken; or null
  bool float_results;     // the output is fp32
  bool accumulates;       // output and lse are added to
};

// Decoding: 16 rows for all warps of a block, which share the keys: 16 for each at a time. `columns` is not used.
inline constexpr int kDecodeRows = 16, kDecodeKeys = 16;
KP_SHARED_CODE constexpr int decode_stage_bytes(MmaTile tile) {
  return kDecodeKeys * (query_pitch(tile) + value_pitch(tile));
}
// A warp's results of 16 rows as floats, with their largest scores and sums.
KP_SHARED_CODE constexpr int decode_result_floats(MmaTile tile) {
  return kDecodeRows * (tile.value_size + 4) + 2 * kDecodeRows;
}
KP_SHARED_CODE constexpr int decode_shared_bytes(MmaTile tile) {
  const int tiles = tile.stages * decode_stage_bytes(tile), results = decode_result_floats(tile) * 4;
  return kDecodeRows * query_pitch(tile) + tile.warps * (tiles > results ? tiles : results);
}

// Keys of one split: those that the rows see are shared evenly, or (split_keys > 0) cut at multiples of split_keys, so
// that where a key falls does not depend on who else is there. Splits begin at multiples of 16.
struct KeySplit {
  int32_t first, last;
};
KP_SHARED_CODE constexpr KeySplit decode_split(const TileRange& range, int32_t split, int32_t splits,
                                               int32_t split_keys, int32_t step) {
  const int32_t base = split_keys > 0 ? 0 : range.first / kDecodeKeys * kDecodeKeys;
  const int32_t share = (range.last - base + splits - 1) / splits;
  const int32_t keys = split_keys > 0 ? split_keys : (share + step - 1) / step * step;
  const int32_t first = base + split * keys;
  // Whole steps before the first key that is seen are left out.
  const int32_t skipped = range.first > first ? (range.first - first) / step * step : 0;
  return {first + skipped, least(range.last, first + keys)};
}

struct DecodeArguments {
  MmaForwardArguments forward;  // tiles: of rows
  int32_t splits, split_keys;   // split_keys: a multiple of the step of all warps, or 0
  float* partial;               // [rows, splits, value_size]: results of each split; null where there is one
  float* partial_lse;           // [rows, splits], in base 2
};

// Both operands of both products, and lse and delta of each query of a step.
KP_SHARED_CODE constexpr int backward_shared_bytes(MmaTile tile) {
  const int pitches = query_pitch(tile) + value_pitch(tile);
  return rows_of(tile) * pitches + tile.stages * tile.columns * (pitches + 8);
}

// A query's lse in base 2 (+inf instead of -inf, so that every exponential of the row is 0), and delta.
struct QueryStatistics {
  float lse, delta;
};

// Which gradients a kernel computes: of queries, or, where rows are keys and the walk is over queries, the others.
enum class Of : uint8_t { kQueries, kKeys, kValues, kKeysAndValues };

struct MmaBackwardArguments {
  ScoreArguments scores;
  RowTensor query, key, value, grad_output;
  RowTensor grad_query, grad_key, grad_value;
  const QueryStatistics* statistics;  // [batch, heads, queries]
  int32_t size, value_size;
  int32_t tiles;          // of the longest sequence
  const int32_t* places;  // as of the forward
  bool float_results;     // the three gradients are fp32
  bool accumulates;       // and are added to
};

struct MmaBiasArguments {
  MmaBackwardArguments backward;
  float* grad_bias;  // [batches, heads, queries, keys], contiguous, each size 1 where the bias broadcasts
  int32_t batches, heads, queries;
  bool adds;  // blocks add to zeros what they have of a sum, in no fixed order
};

// How gradients of captured tensors are added up: by atomics of floats, in no fixed order; or in whole numbers, whose
// sum has no order: first the largest addend is found, which says what a unit is worth.
enum class CapturedMode : uint8_t { kFloats, kMeasure, kWholeNumbers };

struct MmaCapturedArguments {
  MmaBackwardArguments backward;
  CapturedMode mode;
  int32_t* largest;  // bits of the largest addend, of each captured tensor
  int64_t* sums[kMaximumCaptured];
  int64_t counts[kMaximumCaptured];  // elements of each
  int32_t addend_bits;               // there are fewer than 2^this addends
};

struct StatisticsArguments {
  RowTensor output, grad_output;
  const float* lse;
  const float* grad_lse;  // may be null
  QueryStatistics* statistics;
  int64_t rows;  // batch * heads * queries
  int32_t heads, queries, value_size;
};

struct SinksArguments {
  const QueryStatistics* statistics;
  const float* sinks;
  int64_t sinks_stride;
  const int32_t* query_offsets;  // packed: rows past the last one belong to no sequence; else null
  float* grad_sinks;
  int64_t grad_sinks_stride;
  int32_t batches, sequences, heads, queries;
};

}  // namespace kernel_pytorch::attention
