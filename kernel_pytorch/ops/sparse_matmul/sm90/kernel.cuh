// A product with a 2:4 weight on Hopper, by the sparse form of wgmma: persistent blocks of one producer warpgroup, of
// which one thread drives the copy engine, and two consumer warpgroups. Sums have the weight's rows down and x's rows
// across; they leave transposed, through boxes of shared memory. sm_90a.
#pragma once

#include "kernel_pytorch/cuda/ptx/bulk_copy.cuh"
#include "kernel_pytorch/cuda/ptx/control.cuh"
#include "kernel_pytorch/cuda/ptx/fence.cuh"
#include "kernel_pytorch/cuda/ptx/matrix_move.cuh"
#include "kernel_pytorch/cuda/ptx/named_barrier.cuh"
#include "kernel_pytorch/cuda/ptx/tensor_copy.cuh"
#include "kernel_pytorch/cuda/ptx/wgmma.cuh"
#include "kernel_pytorch/cuda/tile/dependent_launch.cuh"
#include "kernel_pytorch/cuda/tile/fragment.cuh"
#include "kernel_pytorch/ops/engines/gemm/sm90/schedule.cuh"
#include "kernel_pytorch/ops/engines/pointwise/cuda/math.cuh"
#include "kernel_pytorch/ops/sparse_matmul/sm90/arguments_cuda.h"

namespace kernel_pytorch::sparse_matmul {

using product::Sm90Place;
using product::Sm90Shared;
using product::Sm90Walk;

enum class Bias { kNone, kOwn, kFloat };

template <class T>
inline constexpr ptx::WgmmaType kTypeOf = ptx::WgmmaType::kBf16;
template <>
inline constexpr ptx::WgmmaType kTypeOf<tile::Float16> = ptx::WgmmaType::kF16;

// One thread: for every stage the weight's rows, their metadata, and x's rows, of which each block of a cluster reads
// half and sends it to both.
template <Config kConfig>
__device__ __forceinline__ void produce(const Arguments& arguments, Sm90Shared& shared, uint32_t memory) {
  constexpr product::Sm90Config kWalk = walk_config(kConfig);
  ptx::prefetch_tensormap(&arguments.product.a);
  ptx::prefetch_tensormap(&arguments.product.b);
  ptx::prefetch_tensormap(&arguments.product.output);
  const int32_t rank = product::block_rank<kWalk>();
  tile::PipelineState state;
  for (Sm90Walk<kWalk> walk(arguments.product); walk.has_tile(); walk.advance()) {
    const Sm90Place place = walk.place();
    const int32_t rows = min(max(arguments.product.m - place.row, 0), kWeightRows);
    const uint32_t metadata_bytes = rows * (kMetadataBytes / kWeightRows);
#pragma unroll 1
    for (int32_t k = 0; k < place.stages; ++k) {
      shared.empty[state.stage].wait(state.parity ^ 1);
      const uint32_t full = shared.full[state.stage].address();
      shared.full[state.stage].arrive_expect_bytes(stage_bytes(kConfig) + metadata_bytes);
      const uint32_t target = memory + state.stage * stage_bytes(kConfig);
      ptx::cp_async_bulk_tensor_3d_shared_global(target, &arguments.product.a, k * (kStageColumns / 2), place.row, 0,
                                                 full);
      if constexpr (kConfig.cluster == 2) {
        constexpr int kHalf = kConfig.rows / 2;
        ptx::cp_async_bulk_tensor_3d_shared_global_multicast(target + kWeightBytes + rank * kHalf * 2 * kStageColumns,
                                                             &arguments.product.b, k * kStageColumns,
                                                             place.column + rank * kHalf, 0, full, 3);
      } else {
        ptx::cp_async_bulk_tensor_3d_shared_global(target + kWeightBytes, &arguments.product.b, k * kStageColumns,
                                                   place.column, 0, full);
      }
      if (rows > 0) {
        const int64_t first = static_cast<int64_t>(k) * arguments.product.m + place.row;
        ptx::cp_async_bulk_shared_global(memory + metadata_at(kConfig) + state.stage * kMetadataBytes,
                                         arguments.metadata + 2 * first, metadata_bytes, full);
      }
      state.advance(kConfig.stages);
    }
  }
}

template <Config kConfig, class T, pointwise::Kind kKind, Bias kBias>
class Consumer {
  using Mma = ptx::SparseWgmma<kConfig.rows, kTypeOf<T>>;
  static constexpr product::Sm90Config kWalk = walk_config(kConfig);
  static constexpr int kLag = 2;
  static constexpr uint32_t kDescriptorAddresses = 0x3ffff;  // a descriptor's bits; those above name a cluster's block

 public:
  __device__ __forceinline__ Consumer(const Arguments& arguments, Sm90Shared& shared, uint32_t memory,
                                      int32_t warpgroup)
      : arguments_(arguments.product),
        shared_(shared),
        memory_(memory),
        warpgroup_(warpgroup),
        warp_(static_cast<int32_t>(threadIdx.x / 32 % 4)),
        lane_(static_cast<int32_t>(threadIdx.x % 32)),
        boxes_(memory + boxes_at(kConfig) + warpgroup * kConfig.boxes * kBoxBytes) {}

  __device__ __forceinline__ void run() {
    // The second warpgroup starts a few stages behind and stays there: one's end overlaps the other's products.
    if (warpgroup_ > 0 && arguments_.k_stages > kLag) shared_.full[kLag].wait(0);
    float sums[Mma::kCount];
    for (Sm90Walk<kWalk> walk(arguments_); walk.has_tile(); walk.advance()) {
      const Sm90Place place = walk.place();
      const int32_t row = place.row + warpgroup_ * 64;
      float bias[2];
      load_bias(bias, row);
      sum(sums, place.stages);
      store(sums, bias, row, place.column);
    }
    if (threadIdx.x % 128 == 0) ptx::cp_async_bulk_wait_group<0>();
  }

 private:
  __device__ __forceinline__ void load_bias(float (&bias)[2], int32_t row) const {
    bias[0] = bias[1] = 0.0f;
    if constexpr (kBias != Bias::kNone) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int32_t at = min(row + warp_ * 16 + lane_ / 4 + 8 * i, arguments_.m - 1);
        if constexpr (kBias == Bias::kFloat) {
          bias[i] = static_cast<const float*>(arguments_.bias)[at];
        } else {
          bias[i] = tile::to_float(static_cast<const T*>(arguments_.bias)[at]);
        }
      }
    }
  }

  // Of each four lanes the first two have the places of the first 32 columns of the stage, the others of the last: the
  // even one of their first 16, of a row and of that 8 further.
  __device__ __forceinline__ uint32_t load_metadata() const {
    const int32_t row = warpgroup_ * 64 + warp_ * 16 + lane_ / 4;
    const uint32_t address =
        memory_ + metadata_at(kConfig) + state_.stage * kMetadataBytes + row * 8 + lane_ % 4 / 2 * 4;
    return __byte_perm(ptx::ld_shared_u32(address), ptx::ld_shared_u32(address + 8 * 8),
                       lane_ % 2 == 0 ? 0x5410 : 0x7632);
  }

  __device__ __forceinline__ void issue_stage(float (&sums)[Mma::kCount], uint32_t& metadata, bool accumulate) const {
    shared_.full[state_.stage].wait(state_.parity);
    metadata = load_metadata();
    const uint32_t stage = (memory_ & kDescriptorAddresses) + state_.stage * stage_bytes(kConfig);
    const uint32_t a = (stage + warpgroup_ * (kWeightBytes / 2)) >> 4, b = (stage + kWeightBytes) >> 4;
    ptx::wgmma_fence();
    Mma::template ss<0, 0, 0>(sums, a, b, metadata, accumulate);
    Mma::template ss<2, 4, 1>(sums, a, b, metadata, true);
    ptx::wgmma_commit_group();
  }

  __device__ __forceinline__ void release(int32_t stage) const {
    const uint32_t barrier = shared_.empty[stage].address();
    if constexpr (kConfig.cluster == 1) {
      if (lane_ == 0) ptx::mbarrier_arrive(barrier);
    } else {
      if (lane_ < kConfig.cluster) ptx::mbarrier_arrive_shared_cluster(ptx::mapa_shared_cluster(barrier, lane_));
    }
  }

  __device__ __forceinline__ static void keep(uint32_t value) {
    uint32_t one[1] = {value};
    ptx::tie_registers(one);
  }

  // The products of one stage while those of the stage before end. A stage's metadata stays in its register until its
  // products have ended.
  __device__ __forceinline__ void step(float (&sums)[Mma::kCount], uint32_t& metadata, uint32_t previous_metadata,
                                       int32_t& previous, bool accumulate) {
    issue_stage(sums, metadata, accumulate);
    ptx::wgmma_wait_group<1>();
    keep(previous_metadata);
    if (accumulate) release(previous);
    previous = state_.stage;
    state_.advance(kConfig.stages);
  }

  __device__ __forceinline__ void sum(float (&sums)[Mma::kCount], int32_t stages) {
    uint32_t even = 0, odd = 0;
    int32_t previous = 0;
#pragma unroll 1
    for (int32_t k = 0; k < stages; k += 2) {
      step(sums, even, odd, previous, k > 0);
      if (k + 1 < stages) step(sums, odd, even, previous, true);
    }
    ptx::wgmma_wait_group<0>();
    keep(even);
    keep(odd);
    ptx::tie_registers(sums);
    release(previous);
  }

  // 64 rows of x at a time: turned on their way into a box of [rows of x][64 columns of the output].
  __device__ __forceinline__ void store(const float (&sums)[Mma::kCount], const float (&bias)[2], int32_t row,
                                        int32_t column) {
    const bool leads = threadIdx.x % 128 == 0;
#pragma unroll
    for (int chunk = 0; chunk < kConfig.rows / kBoxRows; ++chunk) {
      if (leads) ptx::cp_async_bulk_wait_group_read<kConfig.boxes - 1>();
      ptx::barrier_sync_aligned(1 + warpgroup_, 128);
      const uint32_t box = boxes_ + chunk % kConfig.boxes * kBoxBytes;
#pragma unroll
      for (int pair = 0; pair < kBoxRows / 16; ++pair) {
        uint32_t words[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int first = (chunk * kBoxRows / 8 + 2 * pair + i / 2) * 4 + i % 2 * 2;
          float values[2];
#pragma unroll
          for (int j = 0; j < 2; ++j) {
            values[j] = pointwise::function<kKind, false>(sums[first + j] + bias[i % 2]);
          }
          words[i] = tile::Word<T>::pack(values);
        }
        ptx::stmatrix_x4_trans(
            box + tile::swizzled_offset(pair * 16 + lane_ / 16 * 8 + lane_ % 8, warp_ * 2 + lane_ / 8 % 2), words);
      }
      ptx::fence_proxy_async_shared_cta();
      ptx::barrier_sync_aligned(1 + warpgroup_, 128);
      if (leads) {
        const int32_t first = column + chunk * kBoxRows;
        if (row < arguments_.m && first < arguments_.n) {
          ptx::cp_async_bulk_tensor_3d_global_shared(&arguments_.output, row, first, 0, box);
        }
        ptx::cp_async_bulk_commit_group();
      }
    }
  }

  const product::Sm90Arguments& arguments_;
  Sm90Shared& shared_;
  uint32_t memory_;
  int32_t warpgroup_, warp_, lane_;
  uint32_t boxes_;
  tile::PipelineState state_;
};

template <Config kConfig, class T, pointwise::Kind kKind, Bias kBias>
__global__ void __launch_bounds__(product::kSm90Threads, 1)
    sparse_product(const __grid_constant__ Arguments arguments) {
  static_assert(is_legal(kConfig));
  extern __shared__ __align__(1024) unsigned char memory[];
  Sm90Shared& shared = *reinterpret_cast<Sm90Shared*>(memory + barriers_at(kConfig));
  static_assert(sizeof(Sm90Shared) <= product::kSm90BarrierBytes);
  if (threadIdx.x == 0) {
    for (int i = 0; i < kConfig.stages; ++i) {
      shared.full[i].init(1);
      shared.empty[i].init(4 * product::kSm90Warpgroups * kConfig.cluster);
    }
  }
  ptx::fence_proxy_async_shared_cta();
  const auto synchronize = [] {
    if constexpr (kConfig.cluster == 1) {
      __syncthreads();
    } else {
      ptx::barrier_cluster_arrive();
      ptx::barrier_cluster_wait();
    }
  };
  synchronize();
  tile::let_next_kernel_start();
  tile::wait_for_earlier_kernels();
  const uint32_t base = ptx::shared_address(memory);
  const int32_t warpgroup = __shfl_sync(0xffffffffu, static_cast<int32_t>(threadIdx.x / 128), 0);
  if (warpgroup == 0) {
    ptx::setmaxnreg_dec<40>();
    if (threadIdx.x == 0) produce<kConfig>(arguments, shared, base);
    __syncwarp();
  } else {
    ptx::setmaxnreg_inc<232>();
    Consumer<kConfig, T, kKind, kBias>(arguments, shared, base, warpgroup - 1).run();
  }
  // A block must not end while the other may still write into its memory or arrive at its barriers.
  if constexpr (kConfig.cluster > 1) synchronize();
}

}  // namespace kernel_pytorch::sparse_matmul
