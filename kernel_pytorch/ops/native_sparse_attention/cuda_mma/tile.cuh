// A tile of queries: its rows, what of the keys each sees, and walks over these keys in steps that go through shared
// memory two at a time. Forward and the backward of queries are written with it. sm_80.
#pragma once

#include "kernel_pytorch/ops/native_sparse_attention/cuda/common.cuh"
#include "kernel_pytorch/ops/native_sparse_attention/cuda_mma/products.cuh"

namespace kernel_pytorch::native_sparse_attention {

// The keys of a step; no rows: the walk has ended.
struct KeyStep {
  int32_t first, rows;
  int32_t block;  // of a list
};

class RangeSteps {
 public:
  __device__ __forceinline__ RangeSteps(int32_t first, int32_t end) : first_(first), end_(end) {}
  __device__ __forceinline__ KeyStep next() {
    const KeyStep step{first_, min(end_ - first_, kMmaKeys), 0};
    first_ += kMmaKeys;
    return step;
  }

 private:
  int32_t first_, end_;
};

// The blocks that any token of the tile chose, ascending. All lanes of a warp, each warp for itself.
class BlockSteps {
 public:
  __device__ __forceinline__ BlockSteps(const uint32_t* bits, int32_t words, int32_t blocks, int32_t block_size,
                                        int32_t key_begin, int32_t key_end)
      : bits_(bits),
        words_(words),
        blocks_(blocks),
        block_size_(block_size),
        key_begin_(key_begin),
        key_end_(key_end) {}

  __device__ __forceinline__ KeyStep next() {
    offset_ += kMmaKeys;
    if (offset_ >= block_size_ && !find_block()) return {0, 0, 0};
    const int32_t first = key_begin_ + block_ * block_size_ + offset_;
    const int32_t rows = min(min(kMmaKeys, block_size_ - offset_), key_end_ - first);
    if (rows > 0) return {first, rows, block_};
    return {0, 0, 0};  // only the last block ends behind the last key
  }

 private:
  __device__ __forceinline__ bool find_block() {
    while (found_ == 0) {
      chunk_ += 32;
      if (chunk_ >= blocks_) return false;
      const int32_t own = chunk_ + static_cast<int32_t>(threadIdx.x % 32);
      uint32_t any = 0;
      for (int32_t i = 0; own < blocks_ && i < words_; ++i) any |= bits_[own * words_ + i];
      found_ = __ballot_sync(0xffffffffu, any != 0);
    }
    block_ = chunk_ + __ffs(static_cast<int>(found_)) - 1;
    found_ &= found_ - 1;
    offset_ = 0;
    return true;
  }

  const uint32_t* bits_;
  int32_t words_, blocks_, block_size_, key_begin_, key_end_;
  int32_t block_ = -1, chunk_ = -32;
  int32_t offset_ = 1 << 30;  // behind any block: the first step looks for one
  uint32_t found_ = 0;
};

template <class Element, int kSize, bool kBackward, int kBlocks>
class QueryTile {
 public:
  static constexpr int kTileRows = kMmaRows * kBlocks;  // a thread has two rows of each of its warp's kBlocks blocks
  static constexpr int kOwn = 2 * kBlocks;
  static constexpr int kPitch = row_pitch(kSize);
  static constexpr int kStageBytes = 2 * kMmaKeys * kPitch;

  __device__ __forceinline__ QueryTile(const MmaArguments& arguments, char* shared, int32_t index)
      : arguments_(arguments), all_(arguments.all), shared_(shared) {
    // Tiles of one key head together, whose keys then stay in the L2 cache; the longest first.
    key_head = index / arguments.tiles % all_.key_heads;
    batch = index / arguments.tiles / all_.key_heads;
    tokens = tile_tokens(arguments);
    first_token = (arguments.tiles - 1 - index % arguments.tiles) * tokens;
    lane = static_cast<int32_t>(threadIdx.x % 32), warp = static_cast<int32_t>(threadIdx.x / 32);
    char* next = shared + (kBackward ? 2 : 1) * kTileRows * kPitch + kMmaStages * kStageBytes;
    places = reinterpret_cast<Place*>(next);
    lists = reinterpret_cast<int32_t*>(places + tokens);
    importance = reinterpret_cast<float*>(lists + tokens * all_.list_length);
    block_scores = importance + (all_.chooses ? tokens * kMmaKeys : 0);
    bits = reinterpret_cast<uint32_t*>(block_scores);
    if (kBlocks > 1 && all_.chooses) {
      block_scores = arguments.block_scores + static_cast<int64_t>(blockIdx.x) * tokens * all_.key_blocks;
    }
  }

  // Places of the tokens, and rows of queries (and gradients of the output) on their way.
  __device__ __forceinline__ void start() {
    const auto thread = static_cast<int32_t>(threadIdx.x);
    if (thread < tokens) {
      const int32_t token = first_token + thread;
      places[thread] = token < all_.queries ? place_of(all_, token) : Place{-1, 0, 0};
    }
    load_rows(all_.query, query_rows(0), all_.size);
    if constexpr (kBackward) load_rows(all_.grad_output, grad_rows(0), all_.value_size);
    __syncthreads();
    first_slot = 0, end_slot = tokens;  // of tokens that see anything: they are neighbours
    while (end_slot > 0 && places[end_slot - 1].place < 0) --end_slot;
    while (first_slot < end_slot && places[first_slot].place < 0) ++first_slot;
  }
  // Of this thread's rows: lane / 4 and 8 further of each block. Made anew where they are used: registers are full.
  __device__ __forceinline__ int32_t row_index(int own) const { return warp * 16 * kBlocks + lane / 4 + 8 * own; }
  __device__ __forceinline__ int32_t slot(int own) const { return row_index(own) >> arguments_.head_shift; }
  __device__ __forceinline__ int32_t head(int own) const {
    return key_head * all_.group + (row_index(own) & ((1 << arguments_.head_shift) - 1));
  }
  __device__ __forceinline__ bool exists(int own) const {
    return (row_index(own) & ((1 << arguments_.head_shift) - 1)) < all_.group && first_token + slot(own) < all_.queries;
  }
  __device__ __forceinline__ Place place(int own) const { return exists(own) ? places[slot(own)] : Place{-1, 0, 0}; }
  __device__ __forceinline__ bool sees_nothing() const { return first_slot >= end_slot; }

  __device__ __forceinline__ uint32_t query_rows(int32_t block) const {
    return ptx::shared_address(shared_) + block * 16 * kPitch;
  }
  __device__ __forceinline__ uint32_t grad_rows(int32_t block) const { return query_rows(block) + kTileRows * kPitch; }
  __device__ __forceinline__ uint32_t key_rows(int stage) const {
    return query_rows(0) + (kBackward ? 2 : 1) * kTileRows * kPitch + stage * kStageBytes;
  }
  __device__ __forceinline__ uint32_t value_rows(int stage) const { return key_rows(stage) + kMmaKeys * kPitch; }

  // What this thread's rows see of the branches that see ranges.
  __device__ __forceinline__ void compressed_ranges(int32_t (&low)[kOwn], int32_t (&high)[kOwn]) const {
#pragma unroll
    for (int half = 0; half < kOwn; ++half) {
      low[half] = place(half).compressed_begin;
      high[half] = low[half] + (place(half).place < 0 ? 0 : compressed_before(all_, place(half).place + 1));
    }
  }
  __device__ __forceinline__ RangeSteps compressed_steps() const {
    if (sees_nothing()) return {0, 0};
    const Place last = places[end_slot - 1];
    return {places[first_slot].compressed_begin, last.compressed_begin + compressed_before(all_, last.place + 1)};
  }
  __device__ __forceinline__ void window_ranges(int32_t (&low)[kOwn], int32_t (&high)[kOwn]) const {
#pragma unroll
    for (int half = 0; half < kOwn; ++half) {
      const Place own = place(half);
      low[half] = own.key_begin + max(own.place - all_.window + 1, 0);
      high[half] = own.place < 0 ? low[half] : own.key_begin + own.place + 1;
    }
  }
  __device__ __forceinline__ RangeSteps window_steps() const {
    if (sees_nothing()) return {0, 0};
    const Place first = places[first_slot], last = places[end_slot - 1];
    return {first.key_begin + max(first.place - all_.window + 1, 0), last.key_begin + last.place + 1};
  }

  // body(step, stage) for every step, all warps together, with the step's rows in shared memory.
  template <class Steps, class Body>
  __device__ __forceinline__ void walk(Steps& steps, const Rows& keys, const Rows& values, bool with_values,
                                       const Body& body) {
    __syncthreads();  // everyone is done with what the stages held
    KeyStep now = steps.next();
    int stage = 0;
    if (now.rows > 0) load_step(now, keys, values, with_values, stage);
    ptx::cp_async_commit_group();
    while (now.rows > 0) {
      ptx::cp_async_wait_group<0>();
      __syncthreads();  // the step has come, and everyone is done with the one before it
      const KeyStep following = steps.next();
      if (following.rows > 0) load_step(following, keys, values, with_values, 1 - stage);
      ptx::cp_async_commit_group();
      body(now, stage);
      now = following, stage = 1 - stage;
    }
    ptx::cp_async_wait_group<0>();
  }

  // body(step, stage, low, high, times) for the blocks that the tokens' lists name: what the thread's rows see of the
  // step, and how often their lists have the block.
  template <class Body>
  __device__ __forceinline__ void walk_lists(const Body& body) {
    __shared__ int32_t repeats;
    for (int32_t begin = first_slot; begin < end_slot;) {  // tokens of one sequence
      const int32_t key_begin = places[begin].key_begin;
      int32_t end = begin + 1;
      while (end < end_slot && places[end].key_begin == key_begin) ++end;
      const int32_t last = places[end - 1].place, blocks = last / all_.block_size + 1;
      const int32_t words = bit_words(arguments_);
      const auto thread = static_cast<int32_t>(threadIdx.x);
      __syncthreads();
      for (int32_t i = thread; i < blocks * words; i += kMmaThreads) bits[i] = 0;
      if (thread == 0) repeats = 0;
      __syncthreads();
      for (int32_t i = begin * all_.list_length + thread; i < end * all_.list_length; i += kMmaThreads) {
        const int32_t own = i / all_.list_length, block = lists[i];
        if (block < 0 || block > places[own].place / all_.block_size) continue;
        const uint32_t bit = 1u << (own % 32);
        if ((atomicOr(&bits[block * words + own / 32], bit) & bit) != 0) repeats = 1;
      }
      __syncthreads();
      BlockSteps steps(bits, words, blocks, all_.block_size, key_begin, key_begin + last + 1);
      const bool any_repeats = repeats != 0;
      walk(steps, all_.key, all_.value, true, [&](const KeyStep& step, int stage) {
        int32_t low[kOwn], high[kOwn];
        float times[kOwn];
#pragma unroll
        for (int half = 0; half < kOwn; ++half) {
          const int32_t own = slot(half);
          const bool is_chosen = place(half).place >= 0 && own >= begin && own < end &&
                                 (bits[step.block * words + own / 32] >> (own % 32) & 1) != 0;
          low[half] = step.first;
          high[half] = is_chosen ? min(step.first + step.rows, key_begin + place(half).place + 1) : step.first;
          times[half] = 1.0f;
          if (kBlocks == 1 && any_repeats && is_chosen) {  // lists that are chosen name no block twice
            int32_t count = 0;
            for (int32_t i = 0; i < all_.list_length; ++i) count += lists[own * all_.list_length + i] == step.block;
            times[half] = static_cast<float>(count);
          }
        }
        body(step, stage, low, high, times);
      });
      begin = end;
    }
  }

  // Lists that are given, into shared memory; the next barrier makes them visible.
  __device__ __forceinline__ void load_lists() const {
    for (auto i = static_cast<int32_t>(threadIdx.x); i < tokens * all_.list_length; i += kMmaThreads) {
      const int32_t token = first_token + i / all_.list_length;
      lists[i] = token < all_.queries ? all_.lists[list_at(token) * all_.list_length + i % all_.list_length] : -1;
    }
  }
  __device__ __forceinline__ int64_t list_at(int32_t token) const {
    return (static_cast<int64_t>(batch) * all_.queries + token) * all_.key_heads + key_head;
  }
  __device__ __forceinline__ int64_t statistic_at(int half) const {
    return (static_cast<int64_t>(batch) * all_.heads + head(half)) * all_.queries + first_token + slot(half);
  }
  __device__ __forceinline__ float gate(int branch, int half) const {
    return exists(half) ? gate_at<Element>(all_.gates[branch], batch, first_token + slot(half), head(half)) : 0.0f;
  }

  // A warp's rows of results by way of its own rows of queries, which nobody reads any more.
  __device__ __forceinline__ void store_rows(const Rows& to, int32_t columns, const Sums<kSize>& sums, float factor,
                                             int block = 0) {
    const int32_t first_row = (warp * kBlocks + block) * 16;
    char* own = shared_ + first_row * kPitch;
    __syncwarp();
#pragma unroll
    for (int i = 0; i < kSize / 2; i += 2) {
      const float pair[2] = {sums.values[i] * factor, sums.values[i + 1] * factor};
      *reinterpret_cast<uint32_t*>(own + tile::fragment_row(lane, i) * kPitch + tile::fragment_column(lane, i) * 2) =
          tile::Word<Element>::pack(pair);
    }
    __syncwarp();
    constexpr int kUnits = kSize / 8;
    for (int index = lane; index < 16 * kUnits; index += 32) {
      const int32_t row = index / kUnits, column = index % kUnits * 8;
      const Element* from = row_of(to, first_row + row);
      if (from == nullptr || column >= columns) continue;
      ptx::st_global_v4(const_cast<Element*>(from) + column,
                        *reinterpret_cast<const ptx::Word4*>(own + row * kPitch + column * 2));
    }
  }

  int32_t batch, key_head, first_token, tokens, lane, warp;
  int32_t first_slot, end_slot;
  // Shared memory
  Place* places;
  int32_t* lists;
  float *importance, *block_scores;
  uint32_t* bits;

 private:
  // Of a row of the tile, null where it has no token or head.
  __device__ __forceinline__ const Element* row_of(const Rows& rows, int32_t row) const {
    const int32_t token = first_token + (row >> arguments_.head_shift), own = row & ((1 << arguments_.head_shift) - 1);
    if (token >= all_.queries || own >= all_.group) return nullptr;
    return row_at<Element>(rows, batch, token, key_head * all_.group + own);
  }
  __device__ __forceinline__ void load_rows(const Rows& rows, uint32_t target, int32_t columns) const {
    constexpr int kUnits = kSize / 8;
#pragma unroll 4
    for (int i = 0; i < kTileRows * kUnits / kMmaThreads; ++i) {
      const int index = static_cast<int>(threadIdx.x) + i * kMmaThreads;
      copy_unit<Element>(target + index / kUnits * kPitch, row_of(rows, index / kUnits), index % kUnits, columns,
                         rows.data);
    }
  }
  __device__ __forceinline__ void load_step(const KeyStep& step, const Rows& keys, const Rows& values, bool with_values,
                                            int stage) const {
    copy_rows<Element, kMmaKeys, kSize>(key_rows(stage), keys, batch, key_head, step.first, step.rows, all_.size);
    if (!with_values) return;
    copy_rows<Element, kMmaKeys, kSize>(value_rows(stage), values, batch, key_head, step.first, step.rows,
                                        all_.value_size);
  }

  const MmaArguments& arguments_;
  const Arguments& all_;
  char* shared_;
};

// Whether any row of the warp sees a key of the step; all lanes.
template <int kOwn>
__device__ __forceinline__ bool sees_any(const KeyStep& step, const int32_t (&low)[kOwn], const int32_t (&high)[kOwn]) {
  const int32_t end = step.first + step.rows;
  bool any = false;
#pragma unroll
  for (int i = 0; i < kOwn; ++i) any |= max(low[i], step.first) < min(high[i], end);
  return __any_sync(0xffffffffu, any) != 0;
}
// Scores of keys that two rows of the thread do not see become -inf.
template <int kCount>
__device__ __forceinline__ void hide_scores(float (&scores)[kCount], const KeyStep& step, const int32_t* low,
                                            const int32_t* high) {
  if (max(low[0], low[1]) <= step.first && min(high[0], high[1]) >= step.first + 2 * kCount) return;
  const int32_t lane = static_cast<int32_t>(threadIdx.x % 32);
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    const int32_t key = step.first + tile::fragment_column(lane, i), half = i / 2 % 2;
    if (key < low[half] || key >= high[half]) scores[i] = tile::minus_infinity();
  }
}

}  // namespace kernel_pytorch::native_sparse_attention
