// Which of a thread's scores are kept, as bits: bounds, lengths, segments, the mask, a program, dropout. Element i of a
// fragment (attention/cuda/score.cuh) is bit i / 4 * 2 + i % 2 of its row, i / 2 % 2: a thread has two rows.
#pragma once

#include "kernel_pytorch/ops/attention/cuda/dropout_cuda.h"
#include "kernel_pytorch/ops/attention/cuda/score.cuh"

namespace kernel_pytorch::attention {

template <int kCount>
struct Kept {
  static constexpr int kWords = (kCount / 2 + 31) / 32;
  uint32_t words[2][kWords];

  __device__ __forceinline__ bool at(int i) const {
    const int bit = i / 4 * 2 + i % 2;
    return (words[i / 2 % 2][bit / 32] & 1u << bit % 32) != 0;
  }
  __device__ __forceinline__ void clear(int i) {
    const int bit = i / 4 * 2 + i % 2;
    words[i / 2 % 2][bit / 32] &= ~(1u << bit % 32);
  }
};

// Bits of word `word` whose columns, counted from the thread's first, lie below `columns`.
__device__ __forceinline__ uint32_t bits_below(int32_t columns, int word) {
  const int32_t inside = least(greatest(columns - word * 128, 0), 128);
  const int32_t bits = inside / 8 * 2 + least(inside % 8, 2);
  return bits >= 32 ? 0xffffffffu : (1u << bits) - 1u;
}

// Keys that bounds and lengths leave of a row, a query; `key` is that of the thread's first column.
template <Features kFeatures, int kCount>
__device__ __forceinline__ void keep_keys_in_bounds(Kept<kCount>& kept, int row, const Head& head, int32_t query,
                                                    int32_t key) {
  int32_t first = 0, last = head.keys - key;
  if constexpr (kFeatures.right_bound) last = least(last, query + head.right + 1 - key);
  if constexpr (kFeatures.left_bound) first = query + head.left - key;
#pragma unroll
  for (int word = 0; word < Kept<kCount>::kWords; ++word) {
    kept.words[row][word] = bits_below(last, word) & ~bits_below(first, word);
  }
}

// Queries of a row, a key.
template <Features kFeatures, int kCount>
__device__ __forceinline__ void keep_queries_in_bounds(Kept<kCount>& kept, int row, const Head& head, int32_t query,
                                                       int32_t key) {
  int32_t first = 0, last = key < head.keys ? head.queries - query : 0;
  if constexpr (kFeatures.right_bound) first = key - head.right - query;
  if constexpr (kFeatures.left_bound) last = least(last, key - head.left + 1 - query);
#pragma unroll
  for (int word = 0; word < Kept<kCount>::kWords; ++word) {
    kept.words[row][word] = bits_below(last, word) & ~bits_below(first, word);
  }
}

// By bounds and lengths: a range of columns for each of the two rows.
template <Features kFeatures, Rows kRows, int kCount>
__device__ __forceinline__ Kept<kCount> kept_in_bounds(const Head& head, Place place) {
  Kept<kCount> kept;
#pragma unroll
  for (int row = 0; row < 2; ++row) {
    if constexpr (kRows == Rows::kQueries) {
      keep_keys_in_bounds<kFeatures>(kept, row, head, place.query + 8 * row, place.key);
    } else {
      keep_queries_in_bounds<kFeatures>(kept, row, head, place.query, place.key + 8 * row);
    }
  }
  return kept;
}

// Rows and columns beyond the tensors become the last ones. Every lane of a warp reads one of each 32 columns' ids, in
// one wait, and gets those of its own columns from the others. By all lanes, whose tile has the
// same first column.
template <Rows kRows, int kCount>
__device__ __forceinline__ void keep_equal_segments(Kept<kCount>& kept, const ScoreArguments& arguments,
                                                    const Head& head, Place place) {
  constexpr bool kOfQueries = kRows == Rows::kQueries;
  constexpr int kColumns = 2 * kCount, kReads = (kColumns + 31) / 32;
  const SegmentIds& query_ids = arguments.query_segments;
  const SegmentIds& key_ids = arguments.key_segments;
  const int64_t tensor = arguments.query_offsets != nullptr ? 0 : head.batch;  // packed tensors have one batch
  const int32_t* queries = query_ids.ids + tensor * query_ids.batch + head.first_query * query_ids.row;
  const int32_t* keys = key_ids.ids + tensor * key_ids.batch + head.first_key * key_ids.row;
  const int32_t* rows = kOfQueries ? queries : keys;
  const int32_t* columns = kOfQueries ? keys : queries;
  const int64_t row_stride = kOfQueries ? query_ids.row : key_ids.row;
  const int64_t column_stride = kOfQueries ? key_ids.row : query_ids.row;
  const int32_t row = kOfQueries ? place.query : place.key, last_row = (kOfQueries ? head.queries : head.keys) - 1;
  const int32_t lane = static_cast<int32_t>(threadIdx.x % 32), own = lane % 4 * 2;  // own: the thread's first column
  const int32_t column = (kOfQueries ? place.key : place.query) - own + lane;
  const int32_t last_column = (kOfQueries ? head.keys : head.queries) - 1;
  const int32_t ids[2] = {rows[least(row, last_row) * row_stride], rows[least(row + 8, last_row) * row_stride]};
  int32_t read[kReads];
#pragma unroll
  for (int i = 0; i < kReads; ++i) read[i] = columns[least(column + 32 * i, last_column) * column_stride];
  uint32_t equal[2][Kept<kCount>::kWords] = {};
#pragma unroll
  for (int bit = 0; bit < kCount / 2; ++bit) {
    const int at = bit / 2 * 8 + bit % 2;  // of the thread's columns
    const int32_t id = __shfl_sync(0xffffffffu, read[at / 32], at % 32 + own);
    if (id == ids[0]) equal[0][bit / 32] |= 1u << bit % 32;
    if (id == ids[1]) equal[1][bit / 32] |= 1u << bit % 32;
  }
#pragma unroll
  for (int word = 0; word < Kept<kCount>::kWords; ++word) {
    kept.words[0][word] &= ids[0] == -1 ? 0u : equal[0][word];
    kept.words[1][word] &= ids[1] == -1 ? 0u : equal[1][word];
  }
}

// Masks columns whose ids change at most once: a few instructions instead of one comparison per column. `ranges` are
// those of each 64 columns, from the tile's first on. Not for packed sequences, whose columns begin anywhere.
template <Rows kRows, int kCount, int kRanges>
__device__ __forceinline__ void keep_segments_by_ranges(Kept<kCount>& kept, const ScoreArguments& arguments,
                                                        const Head& head, Place place,
                                                        const SegmentRange (&ranges)[kRanges]) {
  constexpr bool kOfQueries = kRows == Rows::kQueries;
  static_assert(2 * kCount == kRanges * kSegmentRangeRows);
  const SegmentIds& segments = kOfQueries ? arguments.query_segments : arguments.key_segments;
  const int32_t* rows = segments.ids + head.batch * segments.batch;
  const int32_t first_row = kOfQueries ? place.query : place.key;
  const int32_t last_row = (kOfQueries ? head.queries : head.keys) - 1;
  const int32_t own = static_cast<int32_t>(threadIdx.x % 4) * 2;  // the thread's first column
#pragma unroll
  for (int row = 0; row < 2; ++row) {
    const int32_t id = rows[least(first_row + 8 * row, last_row) * segments.row];
#pragma unroll
    for (int word = 0; word < Kept<kCount>::kWords; ++word) {
      uint32_t equal = 0;
#pragma unroll
      for (int i = 2 * word; i < (kRanges < 2 * word + 2 ? kRanges : 2 * word + 2); ++i) {
        const uint32_t before = bits_below(ranges[i].split - own, 0) & 0xffffu;
        const int32_t second = ranges[i].first ^ ranges[i].low ^ ranges[i].high;
        const uint32_t bits = (id == ranges[i].first ? before : 0u) | (id == second ? before ^ 0xffffu : 0u);
        equal |= bits << i % 2 * 16;
      }
      kept.words[row][word] &= id == -1 ? 0u : equal;
    }
  }
}

// The same with ranges read here. False, and nothing done, where ids change more often: for the whole warp alike.
template <Rows kRows, int kCount>
__device__ __forceinline__ bool keep_segments_by_ranges(Kept<kCount>& kept, const ScoreArguments& arguments,
                                                        const Head& head, Place place) {
  constexpr bool kOfQueries = kRows == Rows::kQueries;
  constexpr int kRanges = 2 * kCount / kSegmentRangeRows;
  const SegmentIds& segments = kOfQueries ? arguments.key_segments : arguments.query_segments;
  const int32_t column = (kOfQueries ? place.key : place.query) - static_cast<int32_t>(threadIdx.x % 4) * 2;
  const int32_t last = ((kOfQueries ? arguments.keys : arguments.queries) - 1) / kSegmentRangeRows;
  SegmentRange ranges[kRanges];
  bool changes_once = true;
#pragma unroll
  for (int i = 0; i < kRanges; ++i) {
    ranges[i] = segments.ranges[head.batch * segments.ranges_batch + least(column / kSegmentRangeRows + i, last)];
    changes_once = changes_once && ranges[i].split != 0;
  }
  if (!__shfl_sync(0xffffffffu, changes_once, 0)) return false;
  keep_segments_by_ranges<kRows>(kept, arguments, head, place, ranges);
  return true;
}

template <Rows kRows, int kCount>
__device__ __forceinline__ void keep_by_mask(Kept<kCount>& kept, const ScoreArguments& arguments, const Head& head,
                                             Place place) {
  const ScoreTensor& mask = arguments.mask;
  const uint8_t* base = static_cast<const uint8_t*>(mask.data) + head.batch * mask.batch + head.head * mask.head;
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    const int32_t query = least(place.query + query_step<kRows>(i), arguments.queries - 1);
    const int32_t key = least(place.key + key_step<kRows>(i), arguments.keys - 1);
    if (base[query * mask.query + key * mask.key] == 0) kept.clear(i);
  }
}

__device__ __forceinline__ uint8_t block_state(const ScoreArguments& arguments, const Head& head, int32_t query,
                                               int32_t key) {
  const BlockMap& map = arguments.block_map;
  const int32_t row = least(query, arguments.queries - 1) / arguments.key_blocks.rows;
  const int32_t column = least(key, arguments.keys - 1) / arguments.key_blocks.columns;
  return map.states[head.batch * map.batch + head.head * map.head + row * map.row + column];
}

template <Features kFeatures, Rows kRows, int kCount>
__device__ __forceinline__ void keep_by_block_map(Kept<kCount>& kept, const ScoreArguments& arguments, const Head& head,
                                                  Place place) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    const Place at{place.query + query_step<kRows>(i), place.key + key_step<kRows>(i)};
    const uint8_t state = block_state(arguments, head, at.query, at.key);
    bool is_kept = state != 0;
    if constexpr (kFeatures.mask_mod) is_kept = is_kept && (state == kFullBlock || mask_program(arguments, head, at));
    if (!is_kept) kept.clear(i);
  }
}

// A loop: the program once for each score would be long, and take many registers.
template <Rows kRows, int kCount>
__device__ __forceinline__ void keep_by_program(Kept<kCount>& kept, const ScoreArguments& arguments, const Head& head,
                                                Place place) {
  constexpr int kGroups = kCount / 4;  // two rows of two columns
#pragma unroll
  for (int word = 0; word < Kept<kCount>::kWords; ++word) {
    uint32_t bits[2] = {};
#pragma unroll 2
    for (int group = 0; group < (kGroups < 16 * (word + 1) ? kGroups - 16 * word : 16); ++group) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const int i = 64 * word + 4 * group + j;
        const Place at{place.query + query_step<kRows>(i), place.key + key_step<kRows>(i)};
        bits[j / 2] |= static_cast<uint32_t>(mask_program(arguments, head, at)) << (2 * group + j % 2);
      }
    }
    kept.words[0][word] &= bits[0];
    kept.words[1][word] &= bits[1];
  }
}

// The mask of an edge tile. `skips_program`: a full block of a list has answered for mask_mod; `skips_segments`: ids
// are equal. kByRanges: ids by keep_segments_by_ranges where that is enough.
template <Features kFeatures, Rows kRows, int kCount, bool kByRanges = false>
__device__ __forceinline__ Kept<kCount> kept_scores(const ScoreArguments& arguments, const Head& head, Place place,
                                                    bool skips_program, bool skips_segments = false) {
  Kept<kCount> kept = kept_in_bounds<kFeatures, kRows, kCount>(head, place);
  if constexpr (kFeatures.segments) {
    if (!skips_segments) {
      bool is_done = false;
      if constexpr (kByRanges && !kFeatures.packed && 2 * kCount % kSegmentRangeRows == 0) {
        is_done = keep_segments_by_ranges<kRows>(kept, arguments, head, place);
      }
      if (!is_done) keep_equal_segments<kRows>(kept, arguments, head, place);
    }
  }
  if constexpr (kFeatures.mask) keep_by_mask<kRows>(kept, arguments, head, place);
  if constexpr (kFeatures.block_map) {
    keep_by_block_map<kFeatures, kRows>(kept, arguments, head, place);
  } else if constexpr (kFeatures.mask_mod) {
    if (!kFeatures.blocks || !skips_program) keep_by_program<kRows>(kept, arguments, head, place);
  }
  return kept;
}

template <int kCount>
__device__ __forceinline__ void hide(float (&values)[kCount], const Kept<kCount>& kept, float hidden) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) values[i] = kept.at(i) ? values[i] : hidden;
}

// What a kernel reads once of its dropout, for each head.
struct DropoutKey {
  uint64_t seed, offset;
  uint32_t head;
  uint32_t threshold;
  uint32_t query, key;  // of the part's first, multiples of 16
};
template <Features kFeatures>
__device__ __forceinline__ DropoutKey load_dropout(const ScoreArguments& arguments, const Head& head) {
  if constexpr (!kFeatures.dropout) return {};
  return {static_cast<uint64_t>(arguments.seed[0]),
          static_cast<uint64_t>(arguments.seed[1]),
          static_cast<uint32_t>(head.batch * arguments.heads + head.head),
          arguments.dropout_threshold,
          static_cast<uint32_t>(arguments.part_query),
          static_cast<uint32_t>(arguments.part_key)};
}

// Four bytes, each at least the threshold or not, as four bits.
__device__ __forceinline__ uint32_t bytes_kept(uint32_t bytes, uint32_t threshold) {
  uint32_t bits = 0;
#pragma unroll
  for (int i = 0; i < 4; ++i) bits |= (bytes >> 8 * i & 0xff) >= threshold ? 1u << i : 0u;
  return bits;
}

// A call of Philox for eight scores: a 16x16 square has one block for each (query / 2 % 4, key / 2 % 4), and a thread
// holds the two rows of it that its lane's parity names.
template <Rows kRows, int kCount>
__device__ __forceinline__ Kept<kCount> kept_by_dropout(const DropoutKey& dropout, Place place) {
  Kept<kCount> kept{};
  const uint32_t odd = static_cast<uint32_t>(kRows == Rows::kQueries ? place.query : place.key) % 2;
  const uint32_t query_block = dropout_block_index(static_cast<uint32_t>(place.query) + dropout.query);
  const uint32_t key_block = dropout_block_index(static_cast<uint32_t>(place.key) + dropout.key);
#pragma unroll
  for (int square = 0; square < kCount / 8; ++square) {  // of 16 columns
    const uint32_t step = static_cast<uint32_t>(square) * 4;
    const PhiloxBlock block =
        dropout_block(dropout.seed, dropout.offset, dropout.head, query_block + (kRows == Rows::kKeys ? step : 0),
                      key_block + (kRows == Rows::kQueries ? step : 0));
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      uint32_t bits = 0;
      if constexpr (kRows == Rows::kQueries) {
        bits = bytes_kept(odd != 0 ? block.words[2 * row + 1] : block.words[2 * row], dropout.threshold);
      } else {
        const uint32_t shift = 8 * (2 * row + odd);
#pragma unroll
        for (int i = 0; i < 4; ++i) bits |= (block.words[i] >> shift & 0xff) >= dropout.threshold ? 1u << i : 0u;
      }
      kept.words[row][square / 8] |= bits << square % 8 * 4;
    }
  }
  return kept;
}

}  // namespace kernel_pytorch::attention
