// A warpgroup that multiplies: 64 rows, and one half of the value columns. Of the two blocks of keys of a step each
// warpgroup computes the scores and weights of its own and multiplies the weights of both with its half of the values,
// its own from registers, the other's from shared memory, where they replace the rope columns of their keys. So the
// softmax of one runs under the products of the other. The second warpgroup goes by the largest scores of the first,
// and the first scales what it has to the second's, so that both halves of the output are of one scale.
//
// Rules of the compiler that shape the code: nothing is in flight across a loop's back edge, and no branch writes
// accumulators while a product is in flight; so a piece's last step is a body of its own.
#pragma once

#include "kernel_pytorch/cuda/ptx/cluster.cuh"
#include "kernel_pytorch/cuda/ptx/control.cuh"
#include "kernel_pytorch/cuda/ptx/matrix_move.cuh"
#include "kernel_pytorch/cuda/ptx/named_barrier.cuh"
#include "kernel_pytorch/ops/paged_attention/latent/sm90/rows.cuh"

namespace kernel_pytorch::paged_attention {

// Named barriers of both warpgroups; of the last four, one comes and the other waits.
enum LatentBarrier { kBothGroups = 1, kFirstLargest, kSecondLargest, kFirstWeights, kSecondWeights };

template <class Element>
inline constexpr ptx::WgmmaType kLatentType = ptx::WgmmaType::kBf16;
template <>
inline constexpr ptx::WgmmaType kLatentType<tile::Float16> = ptx::WgmmaType::kF16;

template <class Element, Tile kTile, bool kBoxes, int kGroup>
class LatentConsumer : LatentTileRows<Element, kTile> {
  using ScoreMma = ptx::Wgmma<kLatentKeys, kLatentType<Element>>;
  using OutputMma = ptx::Wgmma<256, kLatentType<Element>>;
  using ByColumns = tile::AlongColumns<kLatentKeys>;  // queries, keys and weights
  using ByRows = tile::AlongRows<kLatentKeys>;        // values
  using Rows = LatentTileRows<Element, kTile>;
  using Rows::arguments_, Rows::room_, Rows::piece_, Rows::lane, Rows::own_row;
  static constexpr int kValueSteps = kLatentKeys / tile::kProductDepth;
  static constexpr int kThreadCount = 256;
  static constexpr bool kIsFirst = kGroup == 0;

 public:
  __device__ __forceinline__ LatentConsumer(const WorkArguments& work, const LatentRoom& room)
      : Rows(work.attend, room), shared_(room.shared()) {}

  __device__ __forceinline__ void attend() {
    ptx::barrier_sync_aligned(kBothGroups, kThreadCount);  // products with the queries before are done
    Rows::load_queries();
    ptx::fence_proxy_async_shared_cta();
    ptx::barrier_sync_aligned(kBothGroups, kThreadCount);
#pragma unroll
    for (float& value : output_) value = 0.0f;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      largest_[i] = tile::minus_infinity();
      sum_[i] = 0.0f;
    }
    const int32_t last = piece_.steps.last - 1;
    int32_t step = piece_.steps.first;
    if (step <= last) {
      first_scores();
#pragma unroll 1
      for (; step < last; ++step) take<true>(step);
      take<false>(last);
    }
    store();
  }

 private:
  // The parts of the own block in the order in which they come.
  static constexpr LatentPart kOwnEarly = kIsFirst ? kFirstLeft : kSecondRight;
  static constexpr LatentPart kOwnLate = kIsFirst ? kFirstRight : kSecondLeft;

  __device__ __forceinline__ void wait_for(LatentPart part) {
    shared_.full[part].wait(parity_);
    // Threads' copies are of the generic proxy, the products' reads of the other.
    if constexpr (!kBoxes) ptx::fence_proxy_async_shared_cta();
  }
  // For all blocks that write into this one's memory.
  __device__ __forceinline__ void release(LatentPart part) {
    __syncwarp();
    if constexpr (kBoxes && latent_share(kTile) > 1) {
      if (lane() < latent_share(kTile)) {
        ptx::mbarrier_arrive_shared_cluster(ptx::mapa_shared_cluster(shared_.empty[part].address(), lane()));
      }
    } else {
      if (lane() == 0) shared_.empty[part].arrive();
    }
  }

  template <int kFirst, int kLast>
  __device__ __forceinline__ void issue_scores(bool accumulate) {
    tile::multiply<ScoreMma, ByColumns, ByColumns, kLast, kFirst>(
        scores_, ByColumns::base(LatentRoom::described(room_.queries())),
        ByColumns::base(LatentRoom::described(room_.keys(kGroup))), accumulate);
  }
  __device__ __forceinline__ void issue_early_scores() {
    ptx::wgmma_fence();
    if constexpr (kIsFirst) {
      issue_scores<0, 16>(false);
    } else {
      issue_scores<16, 32>(false);
    }
    ptx::wgmma_commit_group();
  }
  __device__ __forceinline__ void issue_late_scores() {
    ptx::wgmma_fence();
    if constexpr (kIsFirst) {
      issue_scores<16, 36>(true);
    } else {
      issue_scores<0, 16>(true);
      issue_scores<32, 36>(true);
    }
    ptx::wgmma_commit_group();
  }
  __device__ __forceinline__ void first_scores() {
    wait_for(kOwnEarly);
    issue_early_scores();
    wait_for(kOwnLate);
    issue_late_scores();
    wait_for_scores();
  }
  __device__ __forceinline__ void wait_for_scores() {
    ptx::wgmma_wait_group<0>();
    ptx::tie_registers(scores_);
  }

  // The half of a block's values.
  __device__ __forceinline__ uint32_t values(int block) const {
    return ByRows::base(LatentRoom::described(room_.chunk(block, kGroup * kLatentValueChunks / 2)));
  }
  __device__ __forceinline__ void issue_own_values() {
    ptx::wgmma_fence();
    tile::multiply<OutputMma, ByRows, kValueSteps>(output_, weights_, values(kGroup), true);
    ptx::wgmma_commit_group();
  }
  __device__ __forceinline__ void issue_other_values() {
    ptx::wgmma_fence();
    tile::multiply<OutputMma, ByColumns, ByRows, kValueSteps>(
        output_, ByColumns::base(LatentRoom::described(room_.rope(1 - kGroup))), values(1 - kGroup), true);
    ptx::wgmma_commit_group();
  }

  template <bool kHasNext>
  __device__ __forceinline__ void take(int32_t step) {
    hide((2 * step + kGroup) * kLatentKeys);
    if constexpr (kIsFirst) {
      take_first<kHasNext>();
    } else {
      take_second<kHasNext>();
    }
    if constexpr (!kHasNext) parity_ ^= 1;
  }

  template <bool kHasNext>
  __device__ __forceinline__ void take_first() {
    float largest[2], factors[2];
    find_largest(largest);
    publish(largest);
    ptx::barrier_arrive_aligned(kFirstLargest, kThreadCount);
    soften(largest, factors);
    scale_output(factors);
    issue_own_values();
    ptx::barrier_sync_aligned(kSecondLargest, kThreadCount);
    // The second warpgroup's scores may be larger: its half of the output is scaled to them.
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      largest_[i] = shared_.largest[1][own_row() + 8 * i];
      factors[i] = ptx::ex2_approx_ftz_f32(largest[i] - base_of(largest_[i]));
      sum_[i] *= factors[i];
    }
    leave_weights(factors);
    ptx::fence_proxy_async_shared_cta();
    ptx::barrier_arrive_aligned(kFirstWeights, kThreadCount);
    ptx::wgmma_wait_group<0>();
    ptx::tie_registers(output_);
    release(kFirstLeft);
    scale_output(factors);
    ptx::barrier_sync_aligned(kSecondWeights, kThreadCount);
    wait_for(kSecondLeft);
    issue_other_values();
    if constexpr (kHasNext) {
      parity_ ^= 1;
      wait_for(kOwnEarly);
      issue_early_scores();
      ptx::wgmma_wait_group<1>();
      ptx::tie_registers(output_);
      release(kSecondLeft);
      wait_for(kOwnLate);
      issue_late_scores();
      wait_for_scores();
    } else {
      ptx::wgmma_wait_group<0>();
      ptx::tie_registers(output_);
      release(kSecondLeft);
    }
  }

  template <bool kHasNext>
  __device__ __forceinline__ void take_second() {
    float largest[2], factors[2];
    find_largest(largest);
    ptx::barrier_sync_aligned(kFirstLargest, kThreadCount);
#pragma unroll
    for (int i = 0; i < 2; ++i) largest[i] = fmaxf(largest[i], shared_.largest[0][own_row() + 8 * i]);
    publish(largest);
    ptx::barrier_arrive_aligned(kSecondLargest, kThreadCount);
    soften(largest, factors);
    const float one[2] = {1.0f, 1.0f};
    leave_weights(one);
    ptx::fence_proxy_async_shared_cta();
    ptx::barrier_arrive_aligned(kSecondWeights, kThreadCount);
#pragma unroll
    for (int i = 0; i < 2; ++i) largest_[i] = largest[i];
    scale_output(factors);
    issue_own_values();
    ptx::barrier_sync_aligned(kFirstWeights, kThreadCount);
    wait_for(kFirstRight);
    issue_other_values();
    ptx::wgmma_wait_group<1>();
    release(kSecondRight);
    ptx::wgmma_wait_group<0>();
    ptx::tie_registers(output_);
    release(kFirstRight);
    if constexpr (kHasNext) {
      parity_ ^= 1;
      first_scores();
    }
  }

  static __device__ __forceinline__ float base_of(float largest) {
    return largest == tile::minus_infinity() ? 0.0f : largest;
  }

  // Scores to base 2; what the rows do not see becomes -inf.
  __device__ __forceinline__ void hide(int32_t first_key) {
    const float scale = arguments_.scale * tile::kLog2E;
#pragma unroll
    for (float& score : scores_) score *= scale;
    uint32_t there[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) there[i] = reinterpret_cast<const uint32_t*>(shared_.presence[kGroup])[i];
    const bool is_whole = (there[0] & there[1]) == 0xffffffffu;
    if (is_whole && first_key >= piece_.steps.all_first && first_key + kLatentKeys <= piece_.steps.all_last) return;
    const KeyRange ranges[2] = {Rows::range_of(own_row()), Rows::range_of(own_row() + 8)};
#pragma unroll
    for (int i = 0; i < ScoreMma::kCount; ++i) {
      const int32_t column = tile::fragment_column(lane(), i), key = first_key + column;
      const KeyRange& range = ranges[i / 2 % 2];
      const bool is_kept = (there[i / 16] >> column % 32 & 1) != 0 && key >= range.first && key < range.last;
      if (!is_kept) scores_[i] = tile::minus_infinity();
    }
  }

  __device__ __forceinline__ void find_largest(float (&largest)[2]) const {
#pragma unroll
    for (int i = 0; i < 2; ++i) largest[i] = largest_[i];
#pragma unroll
    for (int i = 0; i < ScoreMma::kCount; ++i) largest[i / 2 % 2] = fmaxf(largest[i / 2 % 2], scores_[i]);
#pragma unroll
    for (int i = 0; i < 2; ++i) largest[i] = tile::max_lanes<4>(largest[i]);
  }
  __device__ __forceinline__ void publish(const float (&largest)[2]) {
    if (lane() % 4 != 0) return;
#pragma unroll
    for (int i = 0; i < 2; ++i) shared_.largest[kGroup][own_row() + 8 * i] = largest[i];
  }

  // Scores become weights, and sums follow; `factors` is what the output so far must be multiplied by.
  __device__ __forceinline__ void soften(const float (&largest)[2], float (&factors)[2]) {
    float bases[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      bases[i] = base_of(largest[i]);
      factors[i] = ptx::ex2_approx_ftz_f32(largest_[i] - bases[i]);
      sum_[i] *= factors[i];
    }
#pragma unroll
    for (int i = 0; i < ScoreMma::kCount; ++i) {
      scores_[i] = ptx::ex2_approx_ftz_f32(scores_[i] - bases[i / 2 % 2]);
      sum_[i / 2 % 2] += scores_[i];
    }
    tile::pack_fragment<Element>(weights_, scores_);
  }

  // For the other warpgroup.
  __device__ __forceinline__ void leave_weights(const float (&factors)[2]) {
#pragma unroll
    for (int block = 0; block < ScoreMma::kCount / 8; ++block) {
      uint32_t words[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float* pair = scores_ + 8 * block + 2 * i;
        const float scaled[2] = {pair[0] * factors[i % 2], pair[1] * factors[i % 2]};
        words[i] = tile::Word<Element>::pack(scaled);
      }
      ptx::stmatrix_x4(tile::fragment_address<kLatentRows>(room_.rope(kGroup), own_row() - lane() / 4, block, lane()),
                       words);
    }
  }

  __device__ __forceinline__ void scale_output(const float (&factors)[2]) {
    if (!__any_sync(0xffffffffu, factors[0] != 1.0f || factors[1] != 1.0f)) return;
#pragma unroll
    for (int i = 0; i < OutputMma::kCount; ++i) output_[i] *= factors[i / 2 % 2];
  }

  __device__ __forceinline__ void store() {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float sum = tile::sum_lanes<4>(sum_[i]);
      if (lane() % 4 == 0) shared_.sums[kGroup][own_row() + 8 * i] = sum;
    }
    ptx::barrier_sync_aligned(kBothGroups, kThreadCount);
#pragma unroll
    for (int i = 0; i < 2; ++i) sum_[i] = shared_.sums[0][own_row() + 8 * i] + shared_.sums[1][own_row() + 8 * i];
    Rows::store_rows(output_, largest_, sum_, kGroup * kTile.value_size / 2, kIsFirst);
  }

  LatentShared& shared_;
  uint32_t parity_ = 0;
  float largest_[2], sum_[2];  // of the two rows of this thread; the sum of its own keys
  float scores_[ScoreMma::kCount];
  float output_[OutputMma::kCount];
  uint32_t weights_[ScoreMma::kCount / 2];
};

}  // namespace kernel_pytorch::paged_attention
