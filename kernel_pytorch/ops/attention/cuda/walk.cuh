// Which tiles a block of queries (or of keys) has to visit, in order, and which of them need their conditions asked.
// The same for every kernel: from bounds and lengths, from ranges of segment ids, or from lists of tiles.
#pragma once

#include "kernel_pytorch/ops/attention/cuda/arguments_cuda.h"

namespace kernel_pytorch::attention {

template <Features kFeatures>
__device__ __forceinline__ Head load_head(const ScoreArguments& arguments, int32_t batch, int32_t head) {
  Head result{};
  result.batch = batch;
  result.head = head;
  result.queries = arguments.queries;
  result.keys = arguments.keys;
  if constexpr (kFeatures.packed) {
    const int32_t first_query = arguments.query_offsets[batch], first_key = arguments.key_offsets[batch];
    result.queries = least(arguments.query_offsets[batch + 1] - first_query, arguments.queries);
    result.keys = least(arguments.key_offsets[batch + 1] - first_key, arguments.keys);
    result.first_query = first_query;
    result.first_key = first_key;
  }
  const int32_t key_rows = result.keys;
  if constexpr (kFeatures.key_lengths) {
    const int32_t length = arguments.key_lengths[batch * arguments.key_lengths_stride];
    result.keys = greatest(0, least(key_rows, length));
  }
  result.offset = arguments.has_offset ? arguments.offset : aligned_offset(result.queries, key_rows, result.keys);
  result.left = result.offset + arguments.left;
  result.right = result.offset + arguments.right;
  if constexpr (kFeatures.alibi) {
    const ScoreTensor& slopes = arguments.alibi_slopes;
    result.slope = kLog2e * static_cast<const float*>(slopes.data)[batch * slopes.batch + head * slopes.head];
  }
  return result;
}

struct IdRange {
  int32_t low, high;
};

// The range of the ids of at least rows [first, first + kRows). Tiles of whole blocks begin at a block: no loop.
template <int kRows>
__device__ __forceinline__ IdRange segment_range(const SegmentIds& segments, int32_t batch, int32_t first,
                                                 int32_t total) {
  const SegmentRange* ranges = segments.ranges + batch * segments.ranges_batch;
  const int32_t last = (least(first + kRows, total) - 1) / kSegmentRangeRows;
  IdRange range{0x7fffffff, static_cast<int32_t>(0x80000000)};
  const auto add = [&](int32_t block) {
    range.low = least(range.low, ranges[block].low);
    range.high = greatest(range.high, ranges[block].high);
  };
  if constexpr (kRows % kSegmentRangeRows == 0) {
#pragma unroll
    for (int i = 0; i < kRows / kSegmentRangeRows; ++i) add(least(first / kSegmentRangeRows + i, last));
  } else {
#pragma unroll 1
    for (int32_t block = first / kSegmentRangeRows; block <= last; ++block) add(block);
  }
  return range;
}

struct Step {
  int32_t first;        // key or query at which the tile begins
  bool is_edge;         // conditions must be asked
  bool skips_program;   // all but mask_mod, which a full block answers
  bool skips_segments;  // all but ids: its rows and columns have one
};

// kOverKeys: the tiles of keys that kRows queries from `first` see, last tile first. Else the tiles of queries that see
// kRows keys, first tile first. Made by all threads of a warp together. kPlanned: what segments leave of a walk was
// found ahead, once for all heads.
template <Features kFeatures, bool kOverKeys, int kRows, int kColumns, bool kPlanned = false>
class Walk {
  static constexpr bool kTrims = kFeatures.segments && !kFeatures.packed && !kFeatures.blocks;
  // Tiles of queries past a sequence's end, in a block that hangs over it, are left out: they have no statistics.
  static constexpr bool kStaysInside = !kOverKeys;

 public:
  __device__ __forceinline__ Walk(const ScoreArguments& arguments, const Head& head, int32_t first)
      : arguments_(arguments), head_(head) {
    const int32_t rows = least(kRows, (kOverKeys ? head.queries : head.keys) - first);
    range_ = kOverKeys ? keys_of_queries(kFeatures, head, first, first + rows)
                       : queries_of_keys(kFeatures, head, first, first + rows);
    if constexpr (kFeatures.blocks) {
      find_lists(first / lists().rows);
    } else {
      span_.first_tile = range_.first / kColumns;
      span_.last_tile = (range_.last + kColumns - 1) / kColumns;
      if (range_.first >= range_.last) span_.last_tile = span_.first_tile;
      if constexpr (kTrims && kPlanned) {
        const int32_t tiles = ((kOverKeys ? arguments.queries : arguments.keys) + kRows - 1) / kRows;
        span_ = (kOverKeys ? arguments.key_spans : arguments.query_spans)[head.batch * tiles + first / kRows];
      } else if constexpr (kTrims) {
        rows_range_ = segment_range<kRows>(kOverKeys ? arguments.query_segments : arguments.key_segments, head.batch,
                                           first, kOverKeys ? head.queries : head.keys);
        trim();
      }
      count_ = span_.last_tile - span_.first_tile;
    }
  }

  // The same walk by another thread or later, without looking for its ends again; not for lists of tiles.
  __device__ __forceinline__ Walk(const ScoreArguments& arguments, const Head& head, int32_t first,
                                  const WalkSpan& span)
      : arguments_(arguments), head_(head), span_(span) {
    static_assert(!kFeatures.blocks && (kPlanned || !kTrims));
    const int32_t rows = least(kRows, (kOverKeys ? head.queries : head.keys) - first);
    range_ = kOverKeys ? keys_of_queries(kFeatures, head, first, first + rows)
                       : queries_of_keys(kFeatures, head, first, first + rows);
    count_ = span.last_tile - span.first_tile;
  }
  __device__ __forceinline__ WalkSpan span() const { return span_; }

  __device__ __forceinline__ int32_t count() const { return count_; }

  __device__ __forceinline__ Step at(int32_t i) const {
    Step step{};
    if constexpr (kFeatures.blocks) {
      step.skips_program = i >= partial_tiles_;
      const int32_t tiles = lists().columns / kColumns, at = step.skips_program ? i - partial_tiles_ : i;
      const int64_t stride = (step.skips_program ? lists().full : lists().partial).blocks_place;
      const int32_t block = (step.skips_program ? full_ : partial_)[at / tiles * stride];
      step.first = block * lists().columns + at % tiles * kColumns;
      // Whatever a list holds, its tiles are the sequence's own.
      if constexpr (kStaysInside) step.first = least(step.first, (columns() - 1) / kColumns * kColumns);
    } else {
      step.first = (kOverKeys ? span_.last_tile - 1 - i : span_.first_tile + i) * kColumns;
    }
    step.skips_segments = has_one_id(step.first);
    step.is_edge = is_edge(step.first, step.skips_program) || (kFeatures.segments && !step.skips_segments);
    return step;
  }

  // Whether the tile at column `first` has one id, so that ids need not be compared.
  __device__ __forceinline__ bool has_one_id(int32_t first) const {
    if constexpr (!kTrims) return false;
    if constexpr (kPlanned) return first >= span_.one_first * kColumns && first < span_.one_last * kColumns;
    const IdRange ids = segment_range<kColumns>(column_segments(), head_.batch, first, columns());
    return ids.low == ids.high && rows_range_.low == rows_range_.high && ids.low == rows_range_.low && ids.low != -1;
  }

 private:
  __device__ __forceinline__ const BlockLists& lists() const {
    return kOverKeys ? arguments_.key_blocks : arguments_.query_blocks;
  }
  __device__ __forceinline__ int32_t columns() const { return kOverKeys ? head_.keys : head_.queries; }
  __device__ __forceinline__ const SegmentIds& column_segments() const {
    return kOverKeys ? arguments_.key_segments : arguments_.query_segments;
  }

  __device__ __forceinline__ bool is_edge(int32_t first, bool skips_program) const {
    if constexpr (masks_every_tile(kFeatures)) return true;
    if (kFeatures.mask_mod && !skips_program) return true;
    return first < range_.whole_first || first + kColumns > range_.whole_last;
  }
  __device__ __forceinline__ void find_lists(int32_t row) {
    partial_ = list_of(lists().partial, row, partial_tiles_);
    int32_t full_tiles = 0;
    if (lists().full.counts != nullptr) full_ = list_of(lists().full, row, full_tiles);
    count_ = partial_tiles_ + full_tiles;
    if (range_.first >= range_.last) count_ = 0;
  }
  __device__ __forceinline__ const int32_t* list_of(const BlockIndex& index, int32_t row, int32_t& tiles) const {
    const int32_t count =
        index.counts[head_.batch * index.counts_batch + head_.head * index.counts_head + row * index.counts_row];
    const int32_t* blocks =
        index.blocks + (head_.batch * index.blocks_batch + head_.head * index.blocks_head + row * index.blocks_row);
    tiles = count * (lists().columns / kColumns);
    if constexpr (kStaysInside) {
      if (count > 0) {  // the last block may hang over the end
        const int32_t left = columns() - blocks[(count - 1) * index.blocks_place] * lists().columns;
        tiles -= greatest(0, least(lists().columns, lists().columns - left)) / kColumns;
      }
    }
    return blocks;
  }

  // Leaves out tiles at both ends whose ids meet none of the rows'. 64 at a time are looked at, two by each lane,
  // whose loads are then one wait; both ends in the same look where there are no more.
  __device__ __forceinline__ void trim() {
    const int32_t first = span_.first_tile, last = span_.last_tile;
    Meeting front = meeting(first);
    int32_t begin = first;
    while (front.count == 0 && begin + kLook < last) front = meeting(begin += kLook);
    if (front.count == 0) {
      span_.last_tile = first;
      return;
    }
    Meeting back = front;
    int32_t end = begin;
    if (begin + kLook < last) {
      end = last - kLook;
      back = meeting(end);
      while (back.count == 0) back = meeting(end -= kLook);
    }
    span_.first_tile = begin + front.first;
    span_.last_tile = end + back.first + back.count;
  }
  static constexpr int32_t kLook = 64;
  // The first tile from `tile` on that meets the rows, and the number of tiles from it to the last that does.
  struct Meeting {
    int32_t first, count;
  };
  __device__ __forceinline__ Meeting meeting(int32_t tile) const {
    const int32_t lane = static_cast<int32_t>(threadIdx.x % 32);
    bool meet[kLook / 32];
#pragma unroll
    for (int i = 0; i < kLook / 32; ++i) meet[i] = meets(tile + 32 * i + lane);
    int32_t first = kLook, end = 0;
#pragma unroll
    for (int i = 0; i < kLook / 32; ++i) {
      const uint32_t lanes = __ballot_sync(0xffffffffu, meet[i]);
      if (lanes == 0) continue;
      first = least(first, 32 * i + __ffs(static_cast<int>(lanes)) - 1);
      end = 32 * i + 32 - __clz(static_cast<int>(lanes));
    }
    return {first, greatest(0, end - first)};
  }
  __device__ __forceinline__ bool meets(int32_t tile) const {
    if (tile < span_.first_tile || tile >= span_.last_tile) return false;
    const IdRange ids = segment_range<kColumns>(column_segments(), head_.batch, tile * kColumns, columns());
    return ids.low <= rows_range_.high && rows_range_.low <= ids.high;
  }

  const ScoreArguments& arguments_;
  const Head& head_;
  TileRange range_;
  int32_t count_ = 0;
  WalkSpan span_{};
  IdRange rows_range_{};
  const int32_t* partial_ = nullptr;
  const int32_t* full_ = nullptr;
  int32_t partial_tiles_ = 0;
};

}  // namespace kernel_pytorch::attention
