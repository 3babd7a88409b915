// Step 10: C = A B^T on Hopper. One warpgroup copies, two multiply.
//
// The copy engine (TMA) fills a ring of four stages: one thread names a box of the matrix, the engine brings it,
// swizzled, and counts its bytes on a barrier in shared memory. Each of two consumer warpgroups multiplies 64 x 256 x
// 16 per wgmma, straight from shared memory, while the next product is already queued. Full and empty barriers are the
// only words between the roles. Everything here is written in the primitives of the shipped kernels; the shipped GEMM
// (kernel_pytorch/ops/engines/gemm/sm90/kernel.cuh) adds persistent blocks, pairs of blocks and epilogues.
#include "kernel_pytorch/cuda/ptx/control.cuh"
#include "kernel_pytorch/cuda/ptx/memory.cuh"
#include "kernel_pytorch/cuda/ptx/tensor_copy.cuh"
#include "kernel_pytorch/cuda/tile/barrier.cuh"
#include "kernel_pytorch/cuda/tile/element.cuh"
#include "kernel_pytorch/cuda/tile/fragment.cuh"
#include "kernel_pytorch/cuda/tile/matrix_descriptor.cuh"
#include "kernel_pytorch/cuda/tile/tensor_map_cuda.h"

namespace ptx = kernel_pytorch::ptx;
namespace tile = kernel_pytorch::tile;

constexpr int kTileM = 128, kTileN = 256, kDepth = 64, kStages = 4;
constexpr int kBytesA = kTileM * kDepth * 2, kBytesB = kTileN * kDepth * 2, kStageBytes = kBytesA + kBytesB;
constexpr int kGroup = 16;  // rows of tiles whose blocks run together, so that they find A and B in the L2 cache

struct Barriers {
  tile::Barrier full[kStages], empty[kStages];
};

// Which tile: down kGroup rows of tiles, then one column further.
struct Place {
  int row, column;
  __device__ Place(int block, int rows, int columns) {
    const int group = block / (kGroup * columns), height = min(kGroup, rows - group * kGroup);
    const int inside = block - group * kGroup * columns;
    row = group * kGroup + inside % height;
    column = inside / height;
  }
};

__device__ inline void produce(const tile::TensorMap& a, const tile::TensorMap& b, Barriers& barriers, uint32_t memory,
                               Place place, int steps) {
  tile::PipelineState state;
  for (int step = 0; step < steps; ++step, state.advance(kStages)) {
    barriers.empty[state.stage].wait(state.parity ^ 1);  // the first round finds every stage empty
    tile::Barrier& full = barriers.full[state.stage];
    full.arrive_expect_bytes(kStageBytes);
    const uint32_t stage = memory + state.stage * kStageBytes;
    ptx::cp_async_bulk_tensor_3d_shared_global(stage, &a, step * kDepth, place.row * kTileM, 0, full.address());
    ptx::cp_async_bulk_tensor_3d_shared_global(stage + kBytesA, &b, step * kDepth, place.column * kTileN, 0,
                                               full.address());
  }
}

__device__ inline void consume(uint32_t* c, Barriers& barriers, uint32_t memory, Place place, int warpgroup, int steps,
                               int n) {
  using Mma = ptx::Wgmma<kTileN, ptx::WgmmaType::kBf16>;
  using TileA = tile::AlongColumns<64>;
  using TileB = tile::AlongColumns<kTileN>;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
  float sums[Mma::kCount];
  tile::PipelineState state;
  int previous = 0;
  for (int step = 0; step < steps; ++step, state.advance(kStages)) {
    barriers.full[state.stage].wait(state.parity);
    const uint32_t stage = memory + state.stage * kStageBytes;
    ptx::wgmma_fence();
    tile::multiply<Mma, TileA, TileB, kDepth / 16>(sums, TileA::base(stage + warpgroup * 64 * 128),
                                                   TileB::base(stage + kBytesA), step > 0);
    ptx::wgmma_commit_group();
    if (step > 0) {
      ptx::wgmma_wait_group<1>();  // the product before this one has read its stage
      if (lane == 0) barriers.empty[previous].arrive();
    }
    previous = state.stage;
  }
  ptx::wgmma_wait_group<0>();
  ptx::tie_registers(sums);

  const int row = place.row * kTileM + warpgroup * 64 + warp * 16, column = place.column * kTileN;
#pragma unroll
  for (int i = 0; i < Mma::kCount; i += 2) {
    const int64_t at =
        static_cast<int64_t>(row + tile::fragment_row(lane, i)) * n + column + tile::fragment_column(lane, i);
    c[at / 2] = tile::Word<tile::BFloat16>::pack(sums + i);
  }
}

// m: a multiple of 128, n: of 256, k: of 64. One block per tile, 384 threads.
extern "C" __global__ void __launch_bounds__(384, 1)
    gemm(const __grid_constant__ tile::TensorMap a, const __grid_constant__ tile::TensorMap b, uint32_t* c, int m,
         int n, int k) {
  extern __shared__ __align__(1024) unsigned char memory[];
  Barriers& barriers = *reinterpret_cast<Barriers*>(memory + kStages * kStageBytes);
  if (threadIdx.x == 0) {
    for (int i = 0; i < kStages; ++i) {
      barriers.full[i].init(1);   // the producer, and the bytes it announces
      barriers.empty[i].init(8);  // the warps of both consumers
    }
  }
  ptx::fence_proxy_async_shared_cta();
  __syncthreads();
  const Place place(blockIdx.x, m / kTileM, n / kTileN);
  const uint32_t tiles = ptx::shared_address(memory);
  const int warpgroup = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x / 128), 0);
  if (warpgroup == 0) {
    ptx::setmaxnreg_dec<40>();
    if (threadIdx.x == 0) produce(a, b, barriers, tiles, place, k / kDepth);
    __syncwarp();
  } else {
    ptx::setmaxnreg_inc<232>();
    consume(c, barriers, tiles, place, warpgroup - 1, k / kDepth, n);
  }
}
