// A warpgroup that computes in FP8: 64 queries of each tile against block after block of 128 keys.
//
// A step issues the product of the next scores and that of the last probabilities with their values together, and turns
// the scores into probabilities while the second still runs. The tensor cores keep about 14 bits of an FP8 sum, so a
// block's product with its values begins at zero and is added to the output in fp32, times the values' scale: sums in
// two levels. The compiler's rules are those of attention/sm90/forward/consumer.cuh.
#pragma once

#include "kernel_pytorch/cuda/ptx/control.cuh"
#include "kernel_pytorch/cuda/ptx/named_barrier.cuh"
#include "kernel_pytorch/cuda/tile/matrix_descriptor.cuh"
#include "kernel_pytorch/ops/attention/sm90/forward/parts.cuh"
#include "kernel_pytorch/ops/attention/sm90/forward/store.cuh"
#include "kernel_pytorch/ops/attention/sm90/forward_fp8/producer.cuh"
#include "kernel_pytorch/ops/attention/sm90/forward_fp8/softmax.cuh"

namespace kernel_pytorch::attention::fp8 {

template <ForwardConfig kConfig, Features kFeatures, class Result>
class Consumer {
  using ScoreMma = ptx::Wgmma<kTile, ptx::WgmmaType::kE4M3>;
  using OutputMma = ptx::Wgmma<kConfig.value_size, ptx::WgmmaType::kE4M3>;
  using QueryTile = tile::AlongColumns<kTile>;
  using KeyTile = tile::AlongColumns<kTile>;
  using ValueTile = tile::AlongColumns<kConfig.value_size>;
  static constexpr int kSteps = 4;  // instructions of a product: 32 bytes each

 public:
  __device__ __forceinline__ Consumer(const ForwardArguments& arguments, Sm90Shared& shared, uint32_t tiles,
                                      int32_t warpgroup)
      : arguments_(arguments), shared_(shared), tiles_(tiles) {
    const int32_t warp = __shfl_sync(0xffffffffu, static_cast<int32_t>(threadIdx.x / 32 % 4), 0);
    warp_row_ = 64 * warpgroup + 16 * warp;
  }

  __device__ __forceinline__ void run() {
    if (kConfig.in_turns && warpgroup() == kWarpgroups - 1) pass_turn();
#pragma unroll 1
    while (true) {
      const Sm90Tile tile = read_tile<kFeatures>(shared_, warp_row_ / 16);
      if (tile.kind == TileKind::kEnd) break;
      follow(tile);
    }
    if (kConfig.in_turns && warpgroup() == 0) wait_for_turn();
  }

 private:
  __device__ __forceinline__ void follow(const Sm90Tile& tile) {
    note(tile);
    rows_.begin();
#pragma unroll
    for (int i = 0; i < OutputMma::kCount; ++i) output_[i] = 0;
    if (tile.kind == TileKind::kWork) {
      const ScoreArguments& score = arguments_.base.score;
      const int32_t key_head = tile.batch * (score.heads / score.group) + tile.head / score.group;
      first_scale_ = key_head * arguments_.key_blocks;
      const int32_t query_block =
          (tile.batch * score.heads + tile.head) * arguments_.base.order.query_tiles + tile.query_tile;
      exponent_scale_ = arguments_.base.exponent_scale * arguments_.query_scales[query_block];
      shared_.query_full[query_.stage].wait(query_.parity);
      int32_t key = blocks().first;
      first_step(key);
      key -= kTile;
      // Blocks that a diagonal cuts, those that see every score, and those that a window's left edge cuts.
      if constexpr (kFeatures.right_bound) {
#pragma unroll 1
        for (; key >= blocks().last && key + kTile > blocks().whole_last; key -= kTile) step<true>(key);
      }
#pragma unroll 1
      for (; key >= blocks().last && (!kFeatures.left_bound || key >= blocks().whole_first); key -= kTile) {
        step<false>(key);
      }
      if constexpr (kFeatures.left_bound) {
#pragma unroll 1
        for (; key >= blocks().last; key -= kTile) step<true>(key);
      }
      release(shared_.query_empty[query_.stage]);
      query_.advance(kQueryBuffers);
      last_product();
    }
    store();
  }

  // What a warp knows of its tile waits in shared memory, since its registers are short.
  __device__ __forceinline__ Sm90Memory& memory() const {
    return shared_.memories[warp_row_ / 16];
  }
  __device__ __forceinline__ void note(const Sm90Tile& tile) {
    __syncwarp();
    if (threadIdx.x % 32 == 0) {
      const Head head = load_head<kFeatures>(arguments_.base.score, tile.batch, tile.head);
      const Blocks blocks = blocks_of<kFeatures>(head, tile.query_tile);
      memory().head = head;
      memory().first_query = tile.query_tile * kTile;
      memory().span = {blocks.first, blocks.last, blocks.whole_first, blocks.whole_last};
    }
    __syncwarp();
  }
  __device__ __forceinline__ Blocks blocks() const {
    const volatile WalkSpan& span = memory().span;
    return {span.first_tile, span.last_tile, span.one_first, span.one_last};
  }
  __device__ __forceinline__ int32_t thread_query() const {
    const volatile int32_t& first = memory().first_query;
    return first + warp_row_ + static_cast<int32_t>(threadIdx.x % 32 / 4);
  }

  __device__ __forceinline__ void hide(int32_t key) {
    const volatile Head& head = memory().head;
    const int32_t query = thread_query(), column = key + static_cast<int32_t>(threadIdx.x % 4) * 2;
    int32_t last[2], first[2];  // columns that each of the thread's rows sees
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      last[row] = arguments_.base.score.keys - 1 - column;
      first[row] = 0;
      if constexpr (kFeatures.right_bound) last[row] = least(last[row], query + 8 * row + head.right - column);
      if constexpr (kFeatures.left_bound) first[row] = query + 8 * row + head.left - column;
    }
#pragma unroll
    for (int i = 0; i < ScoreMma::kCount; ++i) {
      const int at = i / 4 * 8 + i % 2;
      const bool is_hidden = at > last[i / 2 % 2] || (kFeatures.left_bound && at < first[i / 2 % 2]);
      scores_[i] = is_hidden ? tile::minus_infinity() : scores_[i];
    }
  }

  // Scores of a tile's first keys, with nothing to overlap them but the other warpgroup.
  __device__ __forceinline__ void first_step(int32_t key) {
    const float scale = exponent_scale_ * __ldg(arguments_.key_scales + first_scale_ + key / kTile);
    value_scale_ = __ldg(arguments_.value_scales + first_scale_ + key / kTile);
    shared_.key_full[key_.stage].wait(key_.parity);
    if constexpr (kConfig.in_turns) wait_for_turn();
    ptx::wgmma_fence();
    issue_scores();
    ptx::wgmma_commit_group();
    if constexpr (kConfig.in_turns) pass_turn();
    ptx::wgmma_wait_group<0>();
    ptx::tie_registers(scores_);
    release_keys();
    hide(key);
    float factors[2];
    rows_.add(scores_, scale, factors);
    pack_probabilities(probabilities_, scores_);
  }

  template <bool kMasked>
  __device__ __forceinline__ void step(int32_t key) {
    const int32_t block = first_scale_ + key / kTile;
    const float scale = exponent_scale_ * __ldg(arguments_.key_scales + block);
    const float next_scale = __ldg(arguments_.value_scales + block);
    const tile::PipelineState value = before(key_);
    shared_.key_full[key_.stage].wait(key_.parity);
    shared_.value_full[value.stage].wait(value.parity);
    if constexpr (kConfig.in_turns) wait_for_turn();
    ptx::wgmma_fence();
    issue_scores();
    ptx::wgmma_commit_group();
    issue_output(value.stage);
    ptx::wgmma_commit_group();
    if constexpr (kConfig.in_turns) pass_turn();
    ptx::wgmma_wait_group<1>();
    ptx::tie_registers(scores_);
    release_keys();
    if constexpr (kMasked) hide(key);
    float factors[2];
    const bool has_grown = rows_.add(scores_, scale, factors);
    pin();
    ptx::wgmma_wait_group<0>();
    ptx::tie_registers(partial_);
    ptx::tie_registers(scores_);
    release(shared_.value_empty[value.stage]);
    promote();
    if (has_grown) {
#pragma unroll
      for (int i = 0; i < OutputMma::kCount; ++i) output_[i] *= factors[i / 2 % 2];
    }
    value_scale_ = next_scale;
    pack_probabilities(probabilities_, scores_);
  }

  __device__ __forceinline__ void last_product() {
    const tile::PipelineState value = before(key_);
    shared_.value_full[value.stage].wait(value.parity);
    if constexpr (kConfig.in_turns) wait_for_turn();
    ptx::wgmma_fence();
    issue_output(value.stage);
    ptx::wgmma_commit_group();
    if constexpr (kConfig.in_turns) pass_turn();
    ptx::wgmma_wait_group<0>();
    ptx::tie_registers(partial_);
    release(shared_.value_empty[value.stage]);
    promote();
  }

  __device__ __forceinline__ void issue_scores() {
    const uint32_t queries =
        QueryTile::base(tiles_ + query_.stage * kTileBytes + warpgroup() * 64 * tile::kChunkRowBytes);
    const uint32_t keys = KeyTile::base(tiles_ + keys_at(kConfig) + key_.stage * kTileBytes);
    tile::multiply<ScoreMma, QueryTile, KeyTile, kSteps>(scores_, queries, keys, false);
  }
  __device__ __forceinline__ void issue_output(int stage) {
    const uint32_t values = ValueTile::base(tiles_ + values_at(kConfig) + stage * value_bytes(kConfig));
    tile::multiply<OutputMma, ValueTile, kSteps>(partial_, probabilities_, values, false);
  }
  // Adds what the tensor core has summed of a block to the output.
  __device__ __forceinline__ void promote() {
#pragma unroll
    for (int i = 0; i < OutputMma::kCount; ++i) output_[i] = fmaf(partial_[i], value_scale_, output_[i]);
  }
  // Keeps the exponentials from being moved behind the wait that follows.
  __device__ __forceinline__ void pin() {
    ptx::st_shared_f32_if_negative(ptx::shared_address(&shared_.pin), rows_.sum[0] + rows_.sum[1]);
  }

  __device__ __forceinline__ void release_keys() {
    release(shared_.key_empty[key_.stage]);
    key_.advance(kConfig.stages);
  }
  static __device__ __forceinline__ tile::PipelineState before(const tile::PipelineState& state) {
    const bool wraps = state.stage == 0;
    return {wraps ? kConfig.stages - 1 : state.stage - 1, state.parity ^ static_cast<uint32_t>(wraps)};
  }
  __device__ __forceinline__ void release(tile::Barrier& empty) {
    __syncwarp();
    if (threadIdx.x % 32 == 0) empty.arrive();
  }

  // Warpgroups alternate in issuing products, so that one's exponentials overlap the other's products.
  __device__ __forceinline__ int32_t warpgroup() const {
    return warp_row_ / 64;
  }
  __device__ __forceinline__ void wait_for_turn() {
    ptx::barrier_sync_aligned(1 + warpgroup(), 256);
  }
  __device__ __forceinline__ void pass_turn() {
    ptx::barrier_arrive_aligned(2 - warpgroup(), 256);
  }

  __device__ __forceinline__ void store() const {
    const OutputRows rows = output_rows(arguments_.base, memory().head, thread_query(), sizeof(Result));
    float factors[2], lse[2];
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      const RowEnd end = end_of_row(quad_sum(rows_.sum[row]), rows_.shift[row], tile::minus_infinity());
      factors[row] = end.factor;
      lse[row] = end.lse;
    }
    store_lse(rows, lse);
    store_rows_as<Result>(rows, output_, factors);
  }

  const ForwardArguments& arguments_;
  Sm90Shared& shared_;
  uint32_t tiles_;  // shared memory
  int32_t warp_row_;
  tile::PipelineState query_, key_;  // values follow their keys by one step through a ring of the same length
  int32_t first_scale_ = 0;          // of the head's keys and values
  float exponent_scale_ = 0;
  float value_scale_ = 0;  // of the values that are multiplied next
  Rows rows_;
  float scores_[ScoreMma::kCount];
  float partial_[OutputMma::kCount];
  float output_[OutputMma::kCount];
  uint32_t probabilities_[ScoreMma::kCount / 4];
};

}  // namespace kernel_pytorch::attention::fp8
