// One thread that keeps the copy engine ahead of the consumers: for every stage the tile's rows of a and columns of b,
// 128 bytes along k. What the blocks of a cluster share, each of them reads half of and sends to both. sm_90.
#pragma once

#include "kernel_pytorch/cuda/ptx/async_copy.cuh"
#include "kernel_pytorch/cuda/ptx/float_pairs.cuh"
#include "kernel_pytorch/cuda/ptx/tensor_copy.cuh"
#include "kernel_pytorch/ops/engines/gemm/sm90/schedule.cuh"

namespace kernel_pytorch::product {

KP_SHARED_CODE constexpr int sm90_element_bytes(Sm90Type type) {
  if (type == Sm90Type::kFloat32 || type == Sm90Type::kFloat32Parts) return 4;
  return type == Sm90Type::kBFloat16 || type == Sm90Type::kFloat16 ? 2 : 1;
}

template <Sm90Config kConfig, Sm90Operands kOperands>
class Sm90Producer {
  static constexpr int kStageElements = kSm90StageBytes / sm90_element_bytes(kOperands.a);
  static constexpr int kChunk = 64;  // elements of a row that is not along k: 128 bytes

 public:
  __device__ __forceinline__ Sm90Producer(const Sm90Arguments& arguments, Sm90Shared& shared, uint32_t tiles)
      : arguments_(arguments), shared_(shared), tiles_(tiles) {}

  __device__ __forceinline__ void run() {
    constexpr int kBytes = sm90_a_bytes(kConfig) + sm90_b_bytes(kConfig);
    ptx::prefetch_tensormap(&arguments_.a);
    ptx::prefetch_tensormap(&arguments_.b);
    ptx::prefetch_tensormap(&arguments_.output);
    tile::PipelineState state;
    for (Sm90Walk<kConfig> walk(arguments_); walk.has_tile(); walk.advance()) {
      const Sm90Place place = walk.place();
      const int32_t batch_a = place.batch * arguments_.a_batched, batch_b = place.batch * arguments_.b_batched;
#pragma unroll 1
      for (int32_t k = place.first_stage; k < place.first_stage + place.stages; ++k) {
        shared_.empty[state.stage].wait(state.parity ^ 1);
        const uint32_t full = shared_.full[state.stage].address();
        shared_.full[state.stage].arrive_expect_bytes(kBytes);
        const uint32_t target = tiles_ + state.stage * kBytes;
        load<kConfig.tile_m, kOperands.a_rows, kConfig.share_a, false>(arguments_.a, target, place.row, k, batch_a,
                                                                       full);
        load<kConfig.tile_n, kOperands.b_columns, !kConfig.share_a, kOperands.b_pairs>(
            arguments_.b, target + sm90_a_bytes(kConfig), place.column, k, batch_b, full);
        state.advance(kConfig.stages);
      }
    }
  }

 private:
  template <int kRows, bool kAcross, bool kShared, bool kPairs>
  __device__ __forceinline__ void load(const tile::TensorMap& map, uint32_t target, int32_t first, int32_t k,
                                       int32_t batch, uint32_t full) {
    constexpr bool kHalf = kShared && sm90_sharing(kConfig) == 2;
    constexpr int kCount = kHalf ? kRows / 2 : kRows;
    if constexpr (kHalf) {
      const int32_t rank = block_rank<kConfig>();
      first += rank * kCount;
      target += rank * kCount * kSm90StageBytes;
    }
    if constexpr (kAcross) {
#pragma unroll
      for (int chunk = 0; chunk < kCount / kChunk; ++chunk) {
        copy<kHalf>(map, target + chunk * kChunk * kSm90StageBytes, first + chunk * kChunk, k * kStageElements, batch,
                    full);
      }
    } else if constexpr (kPairs) {
      copy<kHalf>(map, target, k * kStageElements, 0, first / 2, full);
    } else {
      copy<kHalf>(map, target, k * kStageElements, first, batch, full);
    }
  }

  template <bool kBoth>
  __device__ __forceinline__ void copy(const tile::TensorMap& map, uint32_t target, int32_t x0, int32_t x1, int32_t x2,
                                       uint32_t full) {
    if constexpr (kBoth) {
      ptx::cp_async_bulk_tensor_3d_shared_global_multicast(target, &map, x0, x1, x2, full, 3);
    } else {
      ptx::cp_async_bulk_tensor_3d_shared_global(target, &map, x0, x1, x2, full);
    }
  }

  const Sm90Arguments& arguments_;
  Sm90Shared& shared_;
  uint32_t tiles_;  // shared memory
};

// A warp that brings the scales of blocks: of every stage one factor for each row of a, and of b one for each row (thin
// blocks) or those of the one or two blocks that the tile's columns are in. Its lanes copy without waiting, so that it
// runs as far ahead as there are stages, whatever a read takes.
template <Sm90Config kConfig, Sm90Operands kOperands, bool kThin>
class Sm90FactorProducer {
  static constexpr int kRows = kConfig.tile_m / 32, kColumns = kThin ? kConfig.tile_n / 32 : 1;
  static constexpr bool kGrouped = kOperands.grouping == Sm90Grouping::kRows;
  static constexpr int kAhead = 12;  // stages

 public:
  __device__ __forceinline__ Sm90FactorProducer(const Sm90Arguments& arguments, Sm90Shared& shared, uint32_t tiles)
      : arguments_(arguments),
        shared_(shared),
        target_(tiles + sm90_factors_at(kConfig)),
        lane_(static_cast<int32_t>(threadIdx.x % 32)) {}

  // By a whole warp.
  __device__ __forceinline__ void run() {
    tile::PipelineState state;
    for (typename Sm90WalkOf<kConfig, kOperands.grouping>::Type walk(arguments_); walk.has_tile(); walk.advance()) {
      const Sm90Place place = walk.place();
      find_rows(place);
#pragma unroll 1
      for (int32_t k = place.first_stage; k < place.first_stage + place.stages; ++k) {
        shared_.empty[state.stage].wait(state.parity ^ 1);
        copy(place, k, state.stage);
        ptx::cp_async_mbarrier_arrive_noinc(shared_.full[state.stage].address());
        state.advance(kConfig.stages);
      }
    }
  }

  // Where the factors of a tile's rows are, before its first stage.
  __device__ __forceinline__ void find_rows(const Sm90Place& place) {
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      int32_t row = min(place.row + 32 * i + lane_, (kGrouped ? place.end : arguments_.m) - 1);
      if constexpr (kOperands.gathers_a) row = arguments_.groups.gather_a[row];
      rows_[i] = (row >> arguments_.scale_a_shift) * arguments_.scale_a_row;
    }
  }
  __device__ __forceinline__ void copy(const Sm90Place& place, int32_t k, int stage) const {
    const uint32_t target = target_ + stage * sm90_factor_bytes(kConfig);
    const float* of_rows = arguments_.scale_a + k * arguments_.scale_a_block;
    const float* of_columns = arguments_.scale_b + k * arguments_.scale_b_block;
    if constexpr (kGrouped) of_columns += place.matrix * arguments_.groups.scale_b_stride;
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      ptx::cp_async_ca_shared_global_4(target + (32 * i + lane_) * 4, of_rows + rows_[i]);
    }
    // A column of scales is a line that nobody else reads: its way from memory is longer than the ring.
    if (kGrouped && !kThin && !kOperands.gathers_a && arguments_.scale_a_row == 1 && lane_ == 0) {
      const int32_t ahead = min(k + kAhead, arguments_.k_stages - 1);
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        ptx::prefetch_global_l2(arguments_.scale_a + ahead * arguments_.scale_a_block + rows_[i]);
      }
    }
#pragma unroll
    for (int i = 0; i < kColumns; ++i) {
      const int32_t at = min(place.column + (kThin ? 32 * i + lane_ : lane_ % 2 * 128), arguments_.n - 1);
      const float* source = of_columns + (kThin ? at : at / 128) * arguments_.scale_b_row;
      if (kThin || lane_ < 2) {
        ptx::cp_async_ca_shared_global_4(target + (kConfig.tile_m + 32 * i + lane_) * 4, source);
      }
    }
  }

 private:
  const Sm90Arguments& arguments_;
  Sm90Shared& shared_;
  uint32_t target_;  // shared memory
  int32_t lane_;
  int32_t rows_[kRows];
};

}  // namespace kernel_pytorch::product
