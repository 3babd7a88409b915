// A warpgroup's half of a tile: walks along k with one stage's products always in flight, then hands its sums over.
// Sums of FP8 can leave the tensor core's accumulator (about 14 bits) after every stage, where blocks' scales are
// applied too, and so do those of fp32's parts, which the accumulator cuts off instead of rounding; the other
// warpgroup's products run meanwhile. sm_90a.
#pragma once

#include "kernel_pytorch/cuda/ptx/wgmma.cuh"
#include "kernel_pytorch/cuda/tile/matrix_descriptor.cuh"
#include "kernel_pytorch/ops/engines/gemm/sm90/epilogue.cuh"
#include "kernel_pytorch/ops/engines/gemm/sm90/exchange.cuh"
#include "kernel_pytorch/ops/engines/gemm/sm90/grouped_producer.cuh"

namespace kernel_pytorch::product {

KP_SHARED_CODE constexpr ptx::WgmmaType wgmma_type(Sm90Type type) {
  return type == Sm90Type::kBFloat16                                     ? ptx::WgmmaType::kBf16
         : type == Sm90Type::kFloat16                                    ? ptx::WgmmaType::kF16
         : type == Sm90Type::kFloat8E4M3                                 ? ptx::WgmmaType::kE4M3
         : type == Sm90Type::kFloat32 || type == Sm90Type::kFloat32Parts ? ptx::WgmmaType::kTf32
                                                                         : ptx::WgmmaType::kE5M2;
}

template <bool kAcross, int kRows>
struct OperandTile {
  using Type = tile::AlongColumns<kRows>;
};
template <int kRows>
struct OperandTile<true, kRows> {
  using Type = tile::AlongRows<tile::kChunkColumns>;  // chunks of 64 rows along k
};

template <Sm90Config kConfig, Sm90Operands kOperands, Sm90Epilogue kEpilogue, class Out>
class Sm90Consumer {
  static constexpr int kRowBlocks = kConfig.tile_m / (64 * kSm90Warpgroups);
  static constexpr int kBlockBytes = 64 * kSm90StageBytes;  // 64 rows of a
  static constexpr int kSteps = kSm90StageBytes / 32;       // products of a stage
  static constexpr bool kThin = kEpilogue.scaling == Sm90Scaling::kThinBlocks;
  static constexpr bool kBlocked = kThin || kEpilogue.scaling == Sm90Scaling::kBlocks;
  static_assert(!kBlocked || (kEpilogue.promoted && kConfig.factors));
  static_assert(!kEpilogue.promoted || kConfig.tile_n * kConfig.tile_m <= 128 * 256);
  using Mma = ptx::Wgmma<kConfig.tile_n, wgmma_type(kOperands.a), wgmma_type(kOperands.b)>;
  using TileA = typename OperandTile<kOperands.a_rows, 64>::Type;
  using TileB = typename OperandTile<kOperands.b_columns, kConfig.tile_n>::Type;
  using Walk = typename Sm90WalkOf<kConfig, kOperands.grouping>::Type;

 public:
  __device__ __forceinline__ Sm90Consumer(const Sm90Arguments& arguments, Sm90Shared& shared, uint32_t tiles,
                                          int32_t warpgroup)
      : arguments_(arguments),
        shared_(shared),
        tiles_(tiles & kDescriptorAddresses),
        columns_(tiles + sm90_columns_at(kConfig) + warpgroup * kSm90ColumnBytes),
        factors_(tiles + sm90_factors_at(kConfig)),
        warpgroup_(warpgroup),
        warp_(static_cast<int32_t>(threadIdx.x / 32 % 4)),
        lane_(static_cast<int32_t>(threadIdx.x % 32)),
        finish_(arguments,
                tiles + sm90_boxes_at(kConfig) + (warpgroup * 4 + warp_) * sm90_boxes(kConfig) * kSm90BoxBytes,
                columns_),
        exchange_(shared, tiles, warpgroup * 4 + warp_) {}

  __device__ __forceinline__ void run() {
    // The second warpgroup starts a few stages behind and stays there, so that one warpgroup's epilogue
    // overlaps the other's products.
    if (!kConfig.splits && warpgroup_ > 0 && has_lag()) shared_.full[kLag].wait(0);
    float sums[kRowBlocks][Mma::kCount];
    for (Walk walk(arguments_); walk.has_tile(); walk.advance()) {
      const Sm90Place place = walk.place();
      const int32_t of_warpgroup = place.row + warpgroup_ * kRowBlocks * 64, row = of_warpgroup + warp_ * 16;
      if constexpr (kEpilogue.grouped) {
        if (of_warpgroup >= place.end) {  // the other warpgroup has the tensor cores to itself
          skip(place.stages);
          continue;
        }
      }
      finish_.template prefetch_columns<kConfig.tile_n>(place);
      if constexpr (kEpilogue.promoted) {
        finish_.fetch_first(row, place);
        sum_promoted(sums, place);
      } else {
        sum(sums, row, place);
      }
      finish_.template publish_columns<kConfig.tile_n>(warpgroup_);
      if constexpr (kConfig.splits) {
        if (row >= arguments_.m || !exchange_.meet(sums[0])) continue;
      }
#pragma unroll
      for (int block = 0; block < kRowBlocks; ++block) {
        finish_.store(sums[block], block, row, place);
      }
    }
    finish_.drain();
    if constexpr (kEpilogue.grouped) finish_.clear_tail(warpgroup_ * 128 + threadIdx.x % 128);
  }

 private:
  // Whether the first tile has that many stages. A block may have no tile where only the device knows their number.
  __device__ __forceinline__ bool has_lag() const {
    if constexpr (kOperands.grouping == Sm90Grouping::kNone) {
      return arguments_.k_stages > kLag;
    } else {
      const Walk walk(arguments_);
      return walk.has_tile() && walk.place().stages > kLag;
    }
  }

  // Descriptors hold 18 bits of an address; those above name the block of a cluster.
  static constexpr uint32_t kDescriptorAddresses = 0x3ffff;
  static constexpr int kLag = 2;
  static_assert(kLag < kConfig.stages);

  __device__ __forceinline__ uint32_t stage_address() const {
    return tiles_ + state_.stage * (sm90_a_bytes(kConfig) + sm90_b_bytes(kConfig));
  }
  __device__ __forceinline__ void wait_full() const {
    shared_.full[state_.stage].wait(state_.parity);
    // Threads' copies are of the generic proxy, the products' reads of the other.
    if constexpr (copies_lines(kOperands)) ptx::fence_proxy_async_shared_cta();
  }

  // This warp has read the stage: it arrives at the barriers of the cluster's blocks that write into it.
  __device__ __forceinline__ void release(int32_t stage) const {
    const uint32_t barrier = shared_.empty[stage].address();
    if constexpr (sm90_sharing(kConfig) == 1) {
      if (lane_ == 0) ptx::mbarrier_arrive(barrier);
    } else {
      if (lane_ < kConfig.cluster) ptx::mbarrier_arrive_shared_cluster(ptx::mapa_shared_cluster(barrier, lane_));
    }
  }

  // Gives stages back without a product.
  __device__ __forceinline__ void skip(int32_t stages) {
#pragma unroll 1
    for (; stages > 0; --stages) {
      shared_.full[state_.stage].wait(state_.parity);
      release(state_.stage);
      state_.advance(kConfig.stages);
    }
  }

  __device__ __forceinline__ void issue(float (&sums)[Mma::kCount], int block, bool accumulate) const {
    const uint32_t a = stage_address() + (warpgroup_ * kRowBlocks + block) * kBlockBytes;
    const uint32_t b = stage_address() + sm90_a_bytes(kConfig);
    if constexpr (kOperands.a == Sm90Type::kFloat32Parts) {
      multiply_parts(sums, TileA::base(a), TileB::base(b), accumulate);
    } else {
      tile::multiply<Mma, TileA, TileB, kSteps>(sums, TileA::base(a), TileB::base(b), accumulate);
    }
  }

  // Small by large, large by small, large by large: the smallest first, as an accumulator keeps their last bits then.
  static __device__ __forceinline__ void multiply_parts(float (&sums)[Mma::kCount], uint32_t a, uint32_t b,
                                                        bool accumulate) {
    constexpr int kStep = 2, kSmall = 4;  // of descriptors: eight floats, the small parts
    Mma::template ss<0, 0, kSmall, 0>(sums, a, b, accumulate);
    Mma::template ss<0, 0, kSmall + kStep, kStep>(sums, a, b, true);
    Mma::template ss<0, 0, 0, kSmall>(sums, a, b, true);
    Mma::template ss<0, 0, kStep, kSmall + kStep>(sums, a, b, true);
    Mma::template ss<0, 0, 0, 0>(sums, a, b, true);
    Mma::template ss<0, 0, kStep, kStep>(sums, a, b, true);
  }

  __device__ __forceinline__ void issue_stage(float (&sums)[kRowBlocks][Mma::kCount], bool accumulate) const {
    wait_full();
    ptx::wgmma_fence();
#pragma unroll
    for (int block = 0; block < kRowBlocks; ++block) issue(sums[block], block, accumulate);
    ptx::wgmma_commit_group();
  }

  __device__ __forceinline__ void sum(float (&sums)[kRowBlocks][Mma::kCount], int32_t row, const Sm90Place& place) {
    issue_stage(sums, false);
    if (!kConfig.splits || exchange_.finishes()) finish_.fetch_first(row, place);
    int32_t previous = state_.stage;
    state_.advance(kConfig.stages);
#pragma unroll 1
    for (int32_t k = 1; k < place.stages; ++k) {
      issue_stage(sums, true);
      ptx::wgmma_wait_group<1>();
      release(previous);
      previous = state_.stage;
      state_.advance(kConfig.stages);
    }
    ptx::wgmma_wait_group<0>();
#pragma unroll
    for (int block = 0; block < kRowBlocks; ++block) ptx::tie_registers(sums[block]);
    release(previous);
  }

  __device__ __forceinline__ void sum_promoted(float (&sums)[kRowBlocks][Mma::kCount], const Sm90Place& place) {
    float part[Mma::kCount];
#pragma unroll
    for (int block = 0; block < kRowBlocks; ++block) {
#pragma unroll
      for (int i = 0; i < Mma::kCount; ++i) sums[block][i] = 0.0f;
    }
#pragma unroll 1
    for (int32_t k = 0; k < place.stages; ++k) {
      wait_full();
#pragma unroll
      for (int block = 0; block < kRowBlocks; ++block) {
        ptx::wgmma_fence();
        issue(part, block, false);
        ptx::wgmma_commit_group();
        const Factors factors = load_factors(block, place);
        ptx::wgmma_wait_group<0>();
        ptx::tie_registers(part);
        add(sums[block], part, factors);
        if (block == kRowBlocks - 1) release(state_.stage);
      }
      state_.advance(kConfig.stages);
    }
  }  // Scales of a thread's two rows; if b has one scale per 128 columns, multiplied by it: 192 columns are in
     // two of
  // b's blocks, which meet after the first or the second 64.
  static constexpr int kFactorGroups = !kThin && kConfig.tile_n == 192 ? 3 : 1;
  struct Factors {
    float rows[kFactorGroups][2];
  };
  __device__ __forceinline__ uint32_t factors_address() const {
    return factors_ + state_.stage * sm90_factor_bytes(kConfig);
  }
  __device__ __forceinline__ Factors load_factors(int block, const Sm90Place& place) const {
    Factors factors = {};
    if constexpr (kBlocked) {
      const uint32_t rows = factors_address() + ((warpgroup_ * kRowBlocks + block) * 64 + warp_ * 16 + lane_ / 4) * 4;
      const float of_rows[2] = {ptx::ld_shared_f32(rows), ptx::ld_shared_f32(rows + 8 * 4)};
      float first = 1.0f, second = 1.0f;
      if constexpr (!kThin) first = ptx::ld_shared_f32(factors_address() + kConfig.tile_m * 4);
      if constexpr (kFactorGroups > 1) second = ptx::ld_shared_f32(factors_address() + kConfig.tile_m * 4 + 4);
      const float middle = place.column % 128 == 0 ? first : second;
#pragma unroll
      for (int group = 0; group < kFactorGroups; ++group) {
        const float of_columns = group == 0 ? first : group == 1 ? middle : second;
        factors.rows[group][0] = of_rows[0] * of_columns;
        factors.rows[group][1] = of_rows[1] * of_columns;
      }
    }
    return factors;
  }

  __device__ __forceinline__ void add(float (&sums)[Mma::kCount], const float (&part)[Mma::kCount],
                                      const Factors& factors) const {
#pragma unroll
    for (int i = 0; i < Mma::kCount; i += 4) {
      float of_columns[2] = {1.0f, 1.0f};
      if constexpr (kThin) {
        ptx::ld_shared_v2_f32(of_columns[0], of_columns[1],
                              factors_address() + (kConfig.tile_m + tile::fragment_column(lane_, i)) * 4);
      }
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float value = kThin ? part[i + j] * of_columns[j % 2] : part[i + j];
        constexpr bool kGroups = kFactorGroups > 1;  // of 64 columns
        sums[i + j] =
            kBlocked ? fmaf(value, factors.rows[kGroups ? i / 32 : 0][j / 2], sums[i + j]) : sums[i + j] + value;
      }
    }
  }

  const Sm90Arguments& arguments_;
  Sm90Shared& shared_;
  uint32_t tiles_, columns_, factors_;  // shared memory
  int32_t warpgroup_, warp_, lane_;
  Sm90Finish<kConfig, kEpilogue, Out> finish_;
  Sm90Exchange<kConfig> exchange_;
  tile::PipelineState state_;
};

}  // namespace kernel_pytorch::product
