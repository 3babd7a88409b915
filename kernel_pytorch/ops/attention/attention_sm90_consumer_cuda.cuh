// A warpgroup that computes: 64 queries of each tile against block after block of keys.
//
// A step issues the product of the next scores and that of the last probabilities with their values together, and turns
// the scores into probabilities while the second still runs. The pipeline goes on from tile to tile: a tile's first
// scores are computed beside the last product of the tile before it. Rules of the compiler that shape the code: nothing
// is in flight across a loop's back edge; no branch writes accumulators while a product is in flight, so a careful step
// and a fast step are separate bodies; probabilities are packed only after the product that reads their registers has
// ended; and `pin` keeps the exponentials from being moved behind that wait.
#pragma once

#include "kernel_pytorch/cuda/ptx/control.cuh"
#include "kernel_pytorch/cuda/ptx/matrix_move.cuh"
#include "kernel_pytorch/cuda/ptx/named_barrier.cuh"
#include "kernel_pytorch/cuda/tile/fragment.cuh"
#include "kernel_pytorch/cuda/tile/matrix_descriptor.cuh"
#include "kernel_pytorch/ops/attention/attention_kept_cuda.cuh"
#include "kernel_pytorch/ops/attention/attention_sm90_schedule_cuda.cuh"
#include "kernel_pytorch/ops/attention/attention_sm90_store_cuda.cuh"
#include "kernel_pytorch/ops/attention/attention_walk_cuda.cuh"

namespace kernel_pytorch::attention {

template <class T>
inline constexpr ptx::WgmmaType kWgmmaType = ptx::WgmmaType::kBf16;
template <>
inline constexpr ptx::WgmmaType kWgmmaType<tile::Float16> = ptx::WgmmaType::kF16;

template <Sm90Config kConfig, Features kFeatures, class T>
class Sm90Consumer {
  static constexpr int kQueries = sm90_queries(kConfig);
  static constexpr int kKeys = kConfig.key_block;
  using ScoreMma = ptx::Wgmma<kKeys, kWgmmaType<T>>;
  using OutputMma = ptx::Wgmma<kConfig.value_size, kWgmmaType<T>>;
  using QueryTile = tile::AlongColumns<kQueries>;
  using KeyTile = tile::AlongColumns<kKeys>;
  using ValueTile = tile::AlongRows<kKeys>;
  using KeyWalk = Walk<kFeatures, true, kQueries, kKeys>;
  static constexpr int kScoreSteps = kConfig.head_size / tile::kProductDepth;
  static constexpr int kOutputSteps = kKeys / tile::kProductDepth;
  static constexpr int kQueryWords = kConfig.query_in_registers ? 4 * kScoreSteps : 4;

 public:
  __device__ __forceinline__ Sm90Consumer(const Sm90ForwardArguments& arguments, Sm90Shared& shared, uint32_t tiles,
                                          int32_t warpgroup)
      : arguments_(arguments), shared_(shared), tiles_(tiles), warpgroup_(warpgroup) {
    const int32_t warp = __shfl_sync(0xffffffffu, static_cast<int32_t>(threadIdx.x / 32 % 4), 0);
    warp_row_ = 64 * warpgroup + 16 * warp;
  }

  __device__ __forceinline__ void run() {
#pragma unroll
    for (int i = 0; i < ScoreMma::kCount / 2; ++i) probabilities_[i] = 0;
    if (kConfig.in_turns && warpgroup_ == kConfig.warpgroups - 1) pass_turn();
#pragma unroll 1
    while (true) {
      const Sm90Tile tile = read_tile(shared_, warp());
      if (tile.has_work() || memory().pending_number != 0) follow(tile);
      if (tile.kind == TileKind::kEnd) break;
      if (tile.kind == TileKind::kDrain) drained();
    }
    if (kConfig.in_turns && warpgroup_ == 0) wait_for_turn();
  }

 private:
  // All steps of a tile; the first also ends the tile before it. Without work, that alone: its scores are computed from
  // what lies in shared memory and never used.
  __device__ __forceinline__ void follow(const Sm90Tile& tile) {
    const bool has_work = tile.has_work();
    const Sm90Tile at = has_work ? tile : memory().pending;
    const Head head = load_head<kFeatures>(arguments_.score, at.batch, at.head);
    const int32_t first_query = at.query_tile * kQueries;
    const KeyWalk walk(arguments_.score, head, first_query);
    const int32_t count = has_work ? walk.count() : 1;
    if (count == 0) {
      store_nothing(head, first_query);
      return;
    }
    int32_t i = 0;
#pragma unroll 1
    while (true) {
      const Step step = walk.at(i);
      // Tied where much follows from it that would be computed before the loop, for registers that are short.
      uint32_t query[1] = {static_cast<uint32_t>(first_query)};
      if constexpr (kFeatures.segments) ptx::tie_registers(query);
      const Place place = place_of_thread<Rows::kQueries>(static_cast<int32_t>(query[0]), step.first, warp_row_);
      careful_step(head, place, step, i == 0, i == count - 1, has_work);
      if (i == 0) remember(tile);
      ++i;
      if (memory().pending.kind == TileKind::kWork) i = walk_fast(walk, head, first_query, i, count);
      if (i == count) break;
    }
  }

  // Fast steps from `first` on; returns the first that is not.
  __device__ __forceinline__ int32_t walk_fast(const KeyWalk& walk, const Head& head, int32_t first_query,
                                               int32_t first, int32_t count) {
    if (first == count || is_careful(walk.at(first), head, first_query)) return first;
    // Where edges come from bounds alone, every step up to the left one is fast.
    constexpr bool kHasEvenInterior = !kFeatures.segments && !kFeatures.blocks;
    int32_t end = count;
    if constexpr (kHasEvenInterior && kFeatures.left_bound) {
      const int32_t rows = least(kQueries, head.queries - first_query);
      const int32_t whole = keys_of_queries(kFeatures, head, first_query, first_query + rows).whole_first;
      end = least(count, walk.at(0).first / kKeys + 1 - (whole + kKeys - 1) / kKeys);
    }
    int32_t i = first;
#pragma unroll 1
    do {
      fast_step(head, place_of_thread<Rows::kQueries>(first_query, walk.at(i).first, warp_row_), i == count - 1);
      ++i;
    } while (i < end && (kHasEvenInterior || !is_careful(walk.at(i), head, first_query)));
    return i;
  }

  // A row must have seen a key before a fast step, so the block in which a tile's first query sees its last key counts
  // as an edge even if all of its keys are seen.
  static __device__ __forceinline__ bool is_careful(const Step& step, const Head& head, int32_t first_query) {
    return step.is_edge || (kFeatures.right_bound && step.first + kKeys > first_query + head.right);
  }

  __device__ __forceinline__ void careful_step(const Head& head, Place place, const Step& step, bool is_first,
                                               bool is_last, bool has_keys) {
    const bool has_values = !is_first || memory().pending_number != 0;
    if (is_first && has_keys) {
      load_queries();
      shared_.key_full[key_.stage].wait(key_.parity);
    }
    issue_products();
    float factors[2] = {};
    if (is_first) {
      if (has_values) end_rows(factors);
      rows_.begin();
    }
    wait_for_scores();
    if (has_keys) release_keys(is_last);
    change_scores<kFeatures, T, Rows::kQueries>(scores_, arguments_.score, head, place);
    hide(scores_,
         kept_scores<kFeatures, Rows::kQueries, ScoreMma::kCount>(arguments_.score, head, place, step.skips_program),
         tile::minus_infinity());
    float growth[2];
    rows_.careful(scores_, arguments_.exponent_scale, growth);
    drop(head, place);
    pin();
    if (has_keys) wait_for_next(is_last);
    wait_for_output();
    if (has_values) release_values(has_keys);
    if (is_first) {
      if (has_values) store_pending(factors);
    } else if (__any_sync(0xffffffffu, growth[0] != 1.0f || growth[1] != 1.0f)) {
      scale_output(growth);
    }
    pack_probabilities();
    accumulates_ = !is_first;
    if constexpr (kFeatures.packed || kFeatures.key_lengths) {
      if (has_keys && place.key - static_cast<int32_t>(threadIdx.x % 4) * 2 + kKeys > head.keys) {
        clear_values(head.keys - (place.key - static_cast<int32_t>(threadIdx.x % 4) * 2));
      }
    }
  }

  // Values beyond the last key belong to others or to nobody, and may hold anything: their probability is zero, but
  // zero times NaN is NaN. Every warpgroup clears them for itself, so that none waits for another.
  __device__ __forceinline__ void clear_values(int32_t first_row) {
    const uint32_t values = tiles_ + sm90_values_at(kConfig) + before(key_).stage * sm90_value_bytes(kConfig);
    for (int chunk = 0; chunk < sm90_chunks(kConfig.value_size); ++chunk) {
      const int32_t end = (chunk + 1) * kKeys * tile::kChunkRowBytes;
      int32_t at = (chunk * kKeys + first_row) * tile::kChunkRowBytes + static_cast<int32_t>(threadIdx.x % 128) * 16;
      for (; at < end; at += 128 * 16) ptx::st_shared_v4(values + at, {0, 0, 0, 0});
    }
    ptx::fence_proxy_async_shared_cta();
    ptx::barrier_sync_aligned(1 + kConfig.warpgroups + warpgroup_, 128);
  }

  __device__ __forceinline__ void fast_step(const Head& head, Place place, bool is_last) {
    issue_products();
    float factors[2];
    const bool has_grown = rows_.template has_grown<T>(factors);
    wait_for_scores();
    release_keys(is_last);
    change_scores<kFeatures, T, Rows::kQueries>(scores_, arguments_.score, head, place);
    rows_.fast(scores_, arguments_.exponent_scale);
    drop(head, place);
    pin();
    wait_for_next(is_last);
    wait_for_output();
    release_values(true);
    if (has_grown) scale_output(factors);
    pack_probabilities();
    accumulates_ = true;
  }

  // Scores of the next block, and the last probabilities times their values.
  __device__ __forceinline__ void issue_products() {
    const uint32_t keys = KeyTile::base(tiles_ + sm90_keys_at(kConfig) + key_.stage * sm90_key_bytes(kConfig));
    const uint32_t values =
        ValueTile::base(tiles_ + sm90_values_at(kConfig) + before(key_).stage * sm90_value_bytes(kConfig));
    if constexpr (kConfig.in_turns) wait_for_turn();
    ptx::wgmma_fence();
    if constexpr (kConfig.query_in_registers) {
      tile::multiply<ScoreMma, KeyTile, kScoreSteps>(scores_, query_words_, keys, false);
    } else {
      const uint32_t queries =
          QueryTile::base(tiles_ + query_.stage * sm90_query_bytes(kConfig) + warpgroup_ * 64 * tile::kChunkRowBytes);
      tile::multiply<ScoreMma, QueryTile, KeyTile, kScoreSteps>(scores_, queries, keys, false);
    }
    ptx::wgmma_commit_group();
    tile::multiply<OutputMma, ValueTile, kOutputSteps>(output_, probabilities_, values, accumulates_);
    ptx::wgmma_commit_group();
    if constexpr (kConfig.in_turns) pass_turn();
  }
  __device__ __forceinline__ void wait_for_scores() {
    ptx::wgmma_wait_group<1>();
    ptx::tie_registers(scores_);
  }
  __device__ __forceinline__ void pin() {
    ptx::st_shared_f32_if_negative(ptx::shared_address(&shared_.pin), rows_.sum[0] + rows_.sum[1]);
  }
  __device__ __forceinline__ void wait_for_output() {
    ptx::wgmma_wait_group<0>();
    ptx::tie_registers(output_);
    ptx::tie_registers(scores_);
  }

  __device__ __forceinline__ void load_queries() {
    if constexpr (!kConfig.query_in_registers) {
      shared_.query_full[query_.stage].wait(query_.parity);
    } else {
      const uint32_t parity = memory().query_parity;
      shared_.query_full[0].wait(parity);
#pragma unroll
      for (int k = 0; k < kScoreSteps; ++k) {
        uint32_t block[4];
        ptx::ldmatrix_x4(block, tile::fragment_address<kQueries>(tiles_, warp_row_, k, threadIdx.x % 32));
#pragma unroll
        for (int i = 0; i < 4; ++i) query_words_[4 * k + i] = block[i];
      }
      release(shared_.query_empty[0]);
      if (threadIdx.x % 32 == 0) memory().query_parity = parity ^ 1;
    }
  }
  // What the next step's products read, waited for while this step's second product runs. After a tile's last step
  // there may be no further keys: then the values are waited for twice, which needs no branch.
  __device__ __forceinline__ void wait_for_next(bool is_last) {
    const tile::PipelineState value = before(key_);
    const uint32_t key_full = shared_.key_full[key_.stage].address();
    const uint32_t value_full = shared_.value_full[value.stage].address();
    tile::wait_for_barrier(is_last ? value_full : key_full, is_last ? value.parity : key_.parity);
    tile::wait_for_barrier(value_full, value.parity);
  }
  // Values follow their keys by one step through a ring of the same length.
  static __device__ __forceinline__ tile::PipelineState before(const tile::PipelineState& state) {
    const bool wraps = state.stage == 0;
    return {wraps ? kConfig.stages - 1 : state.stage - 1, state.parity ^ static_cast<uint32_t>(wraps)};
  }
  __device__ __forceinline__ void release_keys(bool is_last) {
    release(shared_.key_empty[key_.stage]);
    key_.advance(kConfig.stages);
    if (!kConfig.query_in_registers && is_last) release_queries();
  }
  // Those of the product that has ended: before `key_` went on to the next keys, if it did.
  __device__ __forceinline__ void release_values(bool has_keys) {
    const tile::PipelineState last = before(key_);
    release(shared_.value_empty[has_keys ? before(last).stage : last.stage]);
  }
  __device__ __forceinline__ void release_queries() {
    release(shared_.query_empty[query_.stage]);
    query_.advance(kConfig.query_buffers);
  }
  __device__ __forceinline__ void release(tile::Barrier& empty) {
    __syncwarp();
    if (threadIdx.x % 32 == 0) empty.arrive();
  }
  __device__ __forceinline__ void drained() {
    release(shared_.drained);
  }

  // Warpgroups issue their products in turns, so that one's exponentials run beside the other's products.
  __device__ __forceinline__ void wait_for_turn() {
    ptx::barrier_sync_aligned(1 + warpgroup_, 256);
  }
  __device__ __forceinline__ void pass_turn() {
    const int32_t next = warpgroup_ + 1 == kConfig.warpgroups ? 0 : warpgroup_ + 1;
    ptx::barrier_arrive_aligned(1 + next, 256);
  }

  __device__ __forceinline__ void drop(const Head& head, Place place) {
    if constexpr (kFeatures.dropout) {
      const DropoutKey key = load_dropout<kFeatures>(arguments_.score, head);
      hide(scores_, kept_by_dropout<Rows::kQueries, ScoreMma::kCount>(key, place), 0.0f);
    }
  }
  __device__ __forceinline__ void scale_output(const float (&factors)[2]) {
#pragma unroll
    for (int i = 0; i < OutputMma::kCount; ++i) output_[i] *= factors[i / 2 % 2];
  }
  __device__ __forceinline__ void pack_probabilities() {
    tile::pack_fragment<T>(probabilities_, scores_);
  }

  __device__ __forceinline__ int32_t warp() const {
    return warp_row_ / 16;
  }
  __device__ __forceinline__ Sm90Memory& memory() const {
    return shared_.memories[warp()];
  }
  __device__ __forceinline__ void remember(const Sm90Tile& tile) {
    __syncwarp();
    if (threadIdx.x % 32 == 0) {
      memory().pending = tile;
      memory().pending_number = tile.has_work() ? memory().tiles_read : 0;
    }
    __syncwarp();
  }
  __device__ __forceinline__ OutputRows rows_of(const Head& head, int32_t first_query) const {
    const int32_t query = first_query + warp_row_ + static_cast<int32_t>(threadIdx.x % 32 / 4);
    return output_rows(arguments_, head, query, sizeof(T));
  }
  __device__ __forceinline__ float sink_of(const Head& head) const {
    if constexpr (!kFeatures.sinks) return tile::minus_infinity();
    return arguments_.score.sinks[head.head * arguments_.score.sinks_stride] * kLog2e;
  }

  // The rows of the tile before are complete but for their last product: their lse, and what the output will be
  // multiplied by.
  __device__ __forceinline__ void end_rows(float (&factors)[2]) {
    const Sm90Tile tile = memory().pending;
    const Head head = load_head<kFeatures>(arguments_.score, tile.batch, tile.head);
    const float sink = sink_of(head);
    float lse[2];
    bool is_in_range = true;
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      const float sum = quad_sum(rows_.sum[row]);
      is_in_range = is_in_range && sum < SumRange<T>::kLimit;
      const RowEnd end = end_of_row(sum, rows_.shift[row], sink);
      factors[row] = kFeatures.dropout ? end.factor * arguments_.score.dropout_scale : end.factor;
      lse[row] = end.lse;
    }
    store_lse(rows_of(head, tile.query_tile * kQueries), lse);
    if (tile.kind == TileKind::kWork && !__all_sync(0xffffffffu, is_in_range) && threadIdx.x % 32 == 0) {
      ask_for_redo(shared_, arguments_, tile, memory().pending_number);
    }
  }
  __device__ __forceinline__ void store_pending(const float (&factors)[2]) const {
    const Sm90Tile tile = memory().pending;
    const Head head = load_head<kFeatures>(arguments_.score, tile.batch, tile.head);
    store_rows<T>(rows_of(head, tile.query_tile * kQueries), output_, factors);
  }

  // A tile whose queries see no key at all.
  __device__ __forceinline__ void store_nothing(const Head& head, int32_t first_query) const {
    const OutputRows target = rows_of(head, first_query);
    const float lse = end_of_row(0.0f, plus_infinity(), sink_of(head)).lse;
    const float zeros[OutputMma::kCount] = {};
    store_rows<T>(target, zeros, {0.0f, 0.0f});
    store_lse(target, {lse, lse});
  }

  const Sm90ForwardArguments& arguments_;
  Sm90Shared& shared_;
  uint32_t tiles_;  // shared memory
  int32_t warpgroup_, warp_row_;
  tile::PipelineState query_, key_;
  bool accumulates_ = false;  // the next product adds to the output
  SoftmaxRows rows_;
  float scores_[ScoreMma::kCount];
  float output_[OutputMma::kCount];
  uint32_t probabilities_[ScoreMma::kCount / 2];
  uint32_t query_words_[kQueryWords];
};

}  // namespace kernel_pytorch::attention
