// A warpgroup that computes: 64 queries of each tile against block after block of keys.
//
// A step issues the product of the next scores and that of the last probabilities with their values together, and turns
// the scores into probabilities while the second still runs. The pipeline goes on from tile to tile: a tile's first
// scores overlap the last product of the previous tile. Rules of the compiler that shape the code: nothing
// is in flight across a loop's back edge; no branch writes accumulators while a product is in flight, so a careful step
// and a fast step are separate bodies; probabilities are packed only after the product that reads their registers has
// ended; and `pin` keeps the exponentials from being moved behind that wait. Parts: attention/sm90/forward/parts.cuh.
#pragma once

#include "kernel_pytorch/cuda/ptx/control.cuh"
#include "kernel_pytorch/cuda/ptx/named_barrier.cuh"
#include "kernel_pytorch/cuda/tile/matrix_descriptor.cuh"
#include "kernel_pytorch/ops/attention/cuda/kept.cuh"
#include "kernel_pytorch/ops/attention/cuda/walk.cuh"
#include "kernel_pytorch/ops/attention/sm90/forward/memory.cuh"
#include "kernel_pytorch/ops/attention/sm90/forward/parts.cuh"
#include "kernel_pytorch/ops/attention/sm90/forward/schedule.cuh"
#include "kernel_pytorch/ops/attention/sm90/forward/tiles.cuh"

namespace kernel_pytorch::attention {

template <class T>
inline constexpr ptx::WgmmaType kWgmmaType = ptx::WgmmaType::kBf16;
template <>
inline constexpr ptx::WgmmaType kWgmmaType<tile::Float16> = ptx::WgmmaType::kF16;

template <Sm90Config kConfig, Features kFeatures, class T, class Result>
class Sm90Consumer {
  static constexpr int kQueries = sm90_queries(kConfig);
  static constexpr int kKeys = kConfig.key_block;
  using ScoreMma = ptx::Wgmma<kKeys, kWgmmaType<T>>;
  using OutputMma = ptx::Wgmma<kConfig.value_size, kWgmmaType<T>>;
  using QueryTile = tile::AlongColumns<kQueries>;
  using KeyTile = tile::AlongColumns<kKeys>;
  using ValueTile = tile::AlongRows<kKeys>;
  static constexpr int kScoreSteps = kConfig.head_size / tile::kProductDepth;
  static constexpr int kOutputSteps = kKeys / tile::kProductDepth;
  static constexpr bool kIsPart = sizeof(Result) == 4;
  static constexpr bool kFoldsAlibi = folds_alibi(kFeatures);
  static constexpr int kQueryWords = kConfig.query_in_registers ? 4 * kScoreSteps : 4;
  static constexpr bool kMasksEarly = masks_early(kFeatures);

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
      const Sm90Tile tile = read_tile<kFeatures>(shared_, warp());
      if (tile.kind == TileKind::kEmpty) {
        store_nothing(tile);
        continue;
      }
      if (tile.has_work() || memory().pending_number != 0) {
        if constexpr (reads_steps(kFeatures)) {
          follow_list(tile);
        } else {
          follow(tile);
        }
      }
      if (tile.kind == TileKind::kEnd) break;
      if (tile.kind == TileKind::kDrain) release(shared_.drained);
    }
    if (kConfig.in_turns && warpgroup_ == 0) wait_for_turn();
  }

 private:
  // All steps of a tile, last keys first; the first also ends the tile before it. Without work, that alone: its scores
  // are computed from what lies in shared memory and never used.
  __device__ __forceinline__ void follow(const Sm90Tile& tile) {
    const bool has_work = tile.has_work();
    Sm90Tile at = memory().pending;
    if (has_work) at = tile;
    const Head head = load_head<kFeatures>(arguments_.score, at.batch, at.head);
    const int32_t first_query = at.query_tile * kQueries;
    note<kFeatures>(memory(), arguments_.score, tile, head, first_query);
    Steps steps = steps_of<kFeatures, kQueries, kKeys>(head, first_query, memory().span);
    if (!has_work) steps = {};
    if (at.kind == TileKind::kRedo) steps.careful_above = 0;
    int32_t key = steps.first;
#pragma unroll 1
    do {
      const bool is_first = key == steps.first;
      careful_step(place_at(key), {key, true, false, has_one_id(key)}, is_first, key == steps.last, has_work);
      if (is_first) remember<kFeatures>(memory());
      key -= kKeys;
    } while (key >= steps.last && key + kKeys > steps.careful_above);
#pragma unroll 1
    while (key >= steps.whole_last) {
      fast_step<false>(place_at(key), {}, key == steps.last);
      key -= kKeys;
    }
    if constexpr (masks_fast_steps(kFeatures)) {
#pragma unroll 1
      while (key >= steps.last) {
        fast_step<true>(place_at(key), {key, true, false, has_one_id(key)}, key == steps.last);
        key -= kKeys;
      }
    }
  }
  __device__ __forceinline__ bool has_one_id(int32_t key) const {
    if constexpr (!has_spans(kFeatures)) return false;
    return key >= memory().span.one_first * kKeys && key < memory().span.one_last * kKeys;
  }

  // The same where the producer has left the steps in shared memory.
  __device__ __forceinline__ void follow_list(const Sm90Tile& tile) {
    const bool has_work = tile.has_work();
    const Sm90Tile at = has_work ? tile : memory().pending;
    note<kFeatures>(memory(), arguments_.score, tile, load_head<kFeatures>(arguments_.score, at.batch, at.head),
                    at.query_tile * kQueries);
    if (has_work) shared_.key_full[key_.stage].wait(key_.parity);
    bool is_first = true;
#pragma unroll 1
    while (true) {
      Sm90Step read{0, kStepIsLast};
      if (has_work) read = shared_.steps[key_.stage];
      const int32_t key = __shfl_sync(0xffffffffu, read.first, 0);
      const uint32_t flags = __shfl_sync(0xffffffffu, read.flags, 0);
      const bool is_last = (flags & kStepIsLast) != 0;
      const Step step{key, true, (flags & kStepSkipsProgram) != 0, false};
      const Place place = place_at(key);
      if (is_first || (flags & kStepIsCareful) != 0 || memory().pending.kind == TileKind::kRedo) {
        careful_step(place, step, is_first, is_last, has_work);
        if (is_first) remember<kFeatures>(memory());
      } else {
        fast_step<false>(place, step, is_last);
      }
      if (is_last) break;
      is_first = false;
    }
  }
  __device__ __forceinline__ Place place_at(int32_t key) const {
    return place_of_thread<Rows::kQueries>(memory().first_query, key, warp_row_);
  }

  __device__ __forceinline__ void careful_step(Place place, const Step& step, bool is_first, bool is_last,
                                               bool has_keys) {
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
      if (has_keys && adds()) take_in_sums();
    }
    const Kept<ScoreMma::kCount> seen = kMasksEarly ? kept(place, step) : Kept<ScoreMma::kCount>{};
    wait_for_scores();
    if (has_keys) release_keys(is_last);
    const Head head = recall_head_for_scores<kFeatures>(memory(), arguments_.score);
    change_scores<kFeatures, T, Rows::kQueries>(scores_, arguments_.score, head, place);
    hide(scores_, kMasksEarly ? seen : kept(place, step), tile::minus_infinity());
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
    tile::pack_fragment<T>(probabilities_, scores_);
    accumulates_ = !is_first;
    if (is_first && has_keys && adds()) take_in_output(growth);
    if constexpr (kFeatures.packed || kFeatures.key_lengths) {
      if (has_keys && place.key - static_cast<int32_t>(threadIdx.x % 4) * 2 + kKeys > head.keys) {
        const uint32_t values = tiles_ + sm90_values_at(kConfig) + before(key_).stage * sm90_value_bytes(kConfig);
        clear_values<kConfig>(values, head.keys - (place.key - static_cast<int32_t>(threadIdx.x % 4) * 2), warpgroup_);
      }
    }
  }

  // kMasked hides probabilities, not scores: a row that has seen nothing yet has +inf where a key is kept, and is done
  // again, and zeros where none is.
  template <bool kMasked>
  __device__ __forceinline__ void fast_step(Place place, const Step& step, bool is_last) {
    issue_products();
    float factors[2];
    const bool has_grown = rows_.template has_grown<T>(factors);
    const Kept<ScoreMma::kCount> seen = kMasked && kMasksEarly ? kept(place, step) : Kept<ScoreMma::kCount>{};
    wait_for_scores();
    release_keys(is_last);
    const Head head = recall_head_for_scores<kFeatures>(memory(), arguments_.score);
    if constexpr (kFoldsAlibi) {
      const int32_t distance = place.key - place.query - head.offset;
      rows_.exponentials_along(scores_, arguments_.score.scale * kLog2e, head.slope, distance);
    } else {
      change_scores<kFeatures, T, Rows::kQueries>(scores_, arguments_.score, head, place);
      rows_.exponentials(scores_, arguments_.exponent_scale);
    }
    if constexpr (kMasked) hide(scores_, kMasksEarly ? seen : kept(place, step), 0.0f);
    rows_.add(scores_);
    drop(head, place);
    pin();
    wait_for_next(is_last);
    wait_for_output();
    release_values(true);
    if (has_grown) scale_output(factors);
    tile::pack_fragment<T>(probabilities_, scores_);
    accumulates_ = true;
  }
  // Not moved behind the wait for a product that follows.
  __device__ __forceinline__ Kept<ScoreMma::kCount> kept(Place place, const Step& step) const {
    const Head head = recall_head<kFeatures>(memory(), arguments_.score);
    auto result = kept_scores<kFeatures, Rows::kQueries, ScoreMma::kCount, true>(
        arguments_.score, head, place, step.skips_program, step.skips_segments);
    ptx::tie_registers(result.words[0]);
    ptx::tie_registers(result.words[1]);
    return result;
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
      load_query_words<kQueries>(query_words_, tiles_, warp_row_);
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

  // Warpgroups alternate in issuing products, so that one's exponentials overlap the other's products.
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

  __device__ __forceinline__ int32_t warp() const {
    return warp_row_ / 16;
  }
  __device__ __forceinline__ Sm90Memory& memory() const {
    return shared_.memories[warp()];
  }
  __device__ __forceinline__ OutputRows rows_of(const Head& head, int32_t first_query) const {
    const int32_t query = first_query + warp_row_ + static_cast<int32_t>(threadIdx.x % 32 / 4);
    return output_rows(arguments_, head, query, sizeof(Result));
  }
  __device__ __forceinline__ bool adds() const {
    return kIsPart && arguments_.accumulates;
  }
  __device__ __forceinline__ void take_in_sums() {
    const OutputRows rows = rows_of(memory().head, memory().first_query);
    const BegunRows begun(rows);
    begun.begin(rows_);
    begun.prefetch(rows);
  }
  // After a tile's first step, which has multiplied the rows' sums by `growth`.
  __device__ __forceinline__ void take_in_output(float (&growth)[2]) {
    if constexpr (kFeatures.dropout) {  // whose factor comes at the end
      const float keep = ptx::rcp_approx_ftz_f32(arguments_.score.dropout_scale);
      growth[0] *= keep;
      growth[1] *= keep;
    }
    const OutputRows rows = rows_of(memory().head, memory().first_query);
    BegunRows(rows).load(output_, rows, growth);
    accumulates_ = true;
  }
  // The rows of the tile before are complete but for their last product: their lse, and what the output will be
  // multiplied by.
  __device__ __forceinline__ void end_rows(float (&factors)[2]) {
    const Sm90Tile tile = memory().pending;
    const float sink = kFeatures.sinks ? memory().pending_sink : tile::minus_infinity();
    float lse[2];
    const float scale = kFeatures.dropout ? arguments_.score.dropout_scale : 1.0f;
    const bool is_in_range = __all_sync(0xffffffffu, attention::end_rows<T>(rows_, sink, scale, factors, lse));
    if constexpr (kIsPart) {
      const bool stores = is_time_to_store(arguments_, tile, is_in_range, warp(), 4 * kConfig.warpgroups);
      if (threadIdx.x % 32 == 0) memory().pending_stores = stores;
      __syncwarp();
    }
    if (stores_pending()) store_lse(rows_of(memory().pending_head, tile.query_tile * kQueries), lse);
    if (tile.kind == TileKind::kWork && !is_in_range && threadIdx.x % 32 == 0) {
      ask_for_redo(shared_, arguments_, tile, memory().pending_number);
    }
  }
  __device__ __forceinline__ void store_pending(const float (&factors)[2]) const {
    if (!stores_pending()) return;
    store_rows_as<Result>(rows_of(memory().pending_head, memory().pending.query_tile * kQueries), output_, factors);
  }
  __device__ __forceinline__ bool stores_pending() const {
    return !kIsPart || memory().pending_stores;
  }

  // A tile whose queries see no key at all.
  __device__ __forceinline__ void store_nothing(const Sm90Tile& tile) const {
    const Head head = load_head<kFeatures>(arguments_.score, tile.batch, tile.head);
    attention::store_nothing<kFeatures, Result, kConfig.value_size>(
        arguments_, rows_of(head, tile.query_tile * kQueries), sink_of<kFeatures>(arguments_.score, head));
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
