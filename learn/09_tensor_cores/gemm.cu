// Step 9: C = A B^T on tensor cores. A is [m][k], B is [n][k] (as the weight of a linear layer), both bf16.
//
// A block of four warps computes 128 x 128 of C. Tiles of A and B come through a ring of three stages in shared memory
// (cp.async: the copy goes on while the warps multiply). A warp reads fragments with ldmatrix and multiplies 16 x 8 x
// 16 at a time with mma; its 64 x 64 sums stay in registers, as in step 5. Rows of a tile are 128 bytes, and their
// 16-byte units are swizzled, so that eight rows at one column lie in eight different banks.
//
// `gemm_in_turn` reads the fragments of 16 elements of k, then multiplies them: tensor cores wait for shared memory.
// `gemm_ahead` asks for the next fragments before it multiplies those it has.
#include "../support/device.cuh"
#include "kernel_pytorch/cuda/ptx/async_copy.cuh"
#include "kernel_pytorch/cuda/ptx/matrix_move.cuh"
#include "kernel_pytorch/cuda/ptx/memory.cuh"
#include "kernel_pytorch/cuda/ptx/mma.cuh"
#include "kernel_pytorch/cuda/tile/fragment.cuh"

namespace ptx = kernel_pytorch::ptx;
namespace tile = kernel_pytorch::tile;

constexpr int kTile = 128, kDepth = 64, kStages = 3, kThreads = 128;
constexpr int kTileBytes = kTile * kDepth * 2, kStageBytes = 2 * kTileBytes;

// A tile's 128 rows of 64 elements: 8 units of 16 bytes per row, 8 units per thread.
__device__ inline void copy_tile(uint32_t to, const uint16_t* from, int row_elements) {
  for (int unit = threadIdx.x; unit < kTile * 8; unit += kThreads) {
    const int row = unit / 8, column = unit % 8;
    ptx::cp_async_cg_shared_global_16(to + tile::swizzled_offset(row, column),
                                      from + static_cast<int64_t>(row) * row_elements + column * 8);
  }
}

// 64 rows of A and 64 columns of B, 16 elements of k each.
struct Fragments {
  uint32_t rows[4][4], columns[4][4];

  __device__ void load(uint32_t stage, int depth, int warp_row, int warp_column) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int row = warp_row + i * 16 + lane % 16, column = warp_column + i * 16 + lane % 16;
      ptx::ldmatrix_x4(rows[i], stage + tile::swizzled_offset(row, depth * 2 + lane / 16));
      ptx::ldmatrix_x4(columns[i], stage + kTileBytes + tile::swizzled_offset(column, depth * 2 + lane / 16));
    }
  }

  __device__ void multiply(float (&sums)[4][8][4]) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {  // 16 columns of B are two operands of eight
        ptx::mma_m16n8k16_f32_bf16(sums[i][2 * j], rows[i], columns[j][0], columns[j][2]);
        ptx::mma_m16n8k16_f32_bf16(sums[i][2 * j + 1], rows[i], columns[j][1], columns[j][3]);
      }
    }
  }
};

__device__ inline void store(const float (&sums)[4][8][4], uint16_t* c, int n, int first_row, int first_column) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
#pragma unroll
    for (int j = 0; j < 8; ++j) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = first_row + i * 16 + tile::fragment_row(lane, 2 * half);
        const int column = first_column + j * 8 + tile::fragment_column(lane, 0);
        const uint32_t pair = to_bf16(sums[i][j][2 * half]) | static_cast<uint32_t>(to_bf16(sums[i][j][2 * half + 1]))
                                                                  << 16;
        *reinterpret_cast<uint32_t*>(c + static_cast<int64_t>(row) * n + column) = pair;
      }
    }
  }
}

template <bool kAhead>
__device__ inline void compute(const uint16_t* a, const uint16_t* b, uint16_t* c, int n, int k) {
  LAUNCHED_SHARED_MEMORY(memory);
  const uint32_t shared = ptx::shared_address(memory);
  const int warp = threadIdx.x / 32, warp_row = warp / 2 * 64, warp_column = warp % 2 * 64;
  a += static_cast<int64_t>(blockIdx.y) * kTile * k;
  b += static_cast<int64_t>(blockIdx.x) * kTile * k;

  const auto stage_of = [&](int step) { return shared + step % kStages * kStageBytes; };
  const auto fetch = [&](int step) {
    if (step * kDepth < k) {
      copy_tile(stage_of(step), a + step * kDepth, k);
      copy_tile(stage_of(step) + kTileBytes, b + step * kDepth, k);
    }
    ptx::cp_async_commit_group();  // an empty group keeps the count
  };
  const auto wait = [] {
    ptx::cp_async_wait_group<kStages - 2>();  // this thread's copies of the next stage have landed
    __syncthreads();                          // everyone's have, and everyone has left the stage that is filled next
  };
  for (int step = 0; step < kStages - 1; ++step) fetch(step);

  constexpr int kSteps = kDepth / 16;  // of a stage
  float sums[4][8][4] = {};            // 64 x 64: four rows and eight columns of 16 x 8
  Fragments fragments[kAhead ? 2 : 1];
  if constexpr (kAhead) {
    wait();
    fragments[0].load(stage_of(0), 0, warp_row, warp_column);
  }
  for (int step = 0; step < k / kDepth; ++step) {
    if constexpr (!kAhead) wait();
    fetch(step + kStages - 1);
#pragma unroll
    for (int depth = 0; depth < kSteps; ++depth) {
      if constexpr (kAhead) {
        if (depth == kSteps - 1) wait();  // after the last product the stage it reads holds no tile, and is not used
        fragments[(depth + 1) % 2].load(stage_of(step + (depth + 1) / kSteps), (depth + 1) % kSteps, warp_row,
                                        warp_column);
        fragments[depth % 2].multiply(sums);
      } else {
        fragments[0].load(stage_of(step), depth, warp_row, warp_column);
        fragments[0].multiply(sums);
      }
    }
  }
  store(sums, c, n, blockIdx.y * kTile + warp_row, blockIdx.x * kTile + warp_column);
}

// m, n: multiples of 128; k: of 64 and at least 128. Grid: [n / 128, m / 128].
extern "C" __global__ void __launch_bounds__(kThreads, 2)
    gemm_in_turn(const uint16_t* a, const uint16_t* b, uint16_t* c, int n, int k) {
  compute<false>(a, b, c, n, k);
}
extern "C" __global__ void __launch_bounds__(kThreads, 2)
    gemm_ahead(const uint16_t* a, const uint16_t* b, uint16_t* c, int n, int k) {
  compute<true>(a, b, c, n, k);
}
