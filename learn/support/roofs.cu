// Roofs of a GPU, each by a kernel that does nothing else: latency of memory, L2 cache, shared memory, mma, wgmma,
// exponentials.
#include "kernel_pytorch/base/fixed_width.h"
#include "kernel_pytorch/cuda/ptx/fence.cuh"
#include "kernel_pytorch/cuda/ptx/math.cuh"
#include "kernel_pytorch/cuda/ptx/matrix_move.cuh"
#include "kernel_pytorch/cuda/ptx/memory.cuh"
#include "kernel_pytorch/cuda/ptx/mma.cuh"
#include "kernel_pytorch/cuda/tile/matrix_descriptor.cuh"

namespace ptx = kernel_pytorch::ptx;
namespace tile = kernel_pytorch::tile;

// Each warp walks from every number to the place it names, 64 bytes at a time: every load waits for the one before it.
// It goes on where the walk before it ended: the same places again would be in the L2 cache.
extern "C" __global__ void walk(const uint32_t* next, int hops, uint32_t* places) {
  uint32_t& place = places[(blockIdx.x * blockDim.x + threadIdx.x) / 32];
  uint32_t at = place;
#pragma unroll 1
  for (int i = 0; i < hops; ++i) at = next[at + threadIdx.x % 16];
  if (threadIdx.x % 32 == 0) place = at;
}

// Every block reads all of `words` (16 bytes each, a power of two of them) `rounds` times, from a place of its own on:
// after the first round they come from the L2 cache, since L1 holds a small part of them.
extern "C" __global__ void l2_rate(const ptx::Word4* words, int count, int rounds, uint32_t* out) {
  const uint32_t first = blockIdx.x * 8191u * blockDim.x + threadIdx.x, mask = count - 1;
  uint32_t sum = 0;
#pragma unroll 1
  for (uint32_t at = 0; at < static_cast<uint32_t>(rounds) * count; at += 8 * blockDim.x) {
    ptx::Word4 values[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      values[i] = ptx::ld_global_nc_l1_no_allocate_v4(words + ((first + at + i * blockDim.x) & mask));
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) sum ^= values[i].x ^ values[i].y ^ values[i].z ^ values[i].w;
  }
  out[blockIdx.x * blockDim.x + threadIdx.x] = sum;
}

// ldmatrix of 512 bytes, eight per round and warp, without conflicts of banks.
extern "C" __global__ void shared_rate(int rounds, uint32_t* out) {
  __shared__ __align__(1024) unsigned char memory[8 * 512];
  for (int i = threadIdx.x; i < 1024; i += blockDim.x) reinterpret_cast<uint32_t*>(memory)[i] = i;
  __syncthreads();
  const uint32_t at = ptx::shared_address(memory) + threadIdx.x % 32 * 16;
  uint32_t sum = 0;
#pragma unroll 1
  for (int round = 0; round < rounds; ++round) {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      uint32_t values[4];
      ptx::ldmatrix_x4(values, at + i * 512);
      sum ^= values[0] ^ values[1] ^ values[2] ^ values[3];
    }
  }
  out[blockIdx.x * blockDim.x + threadIdx.x] = sum;
}

// 16 x 8 x 16 products, 16 sums per warp that do not wait for each other.
extern "C" __global__ void mma_rate(const uint32_t* words, int rounds, float* out) {
  uint32_t a[4], b[2];
  for (int i = 0; i < 4; ++i) a[i] = words[threadIdx.x * 8 + i];
  for (int i = 0; i < 2; ++i) b[i] = words[threadIdx.x * 8 + 4 + i];
  float sums[16][4] = {};
#pragma unroll 1
  for (int round = 0; round < rounds; ++round) {
#pragma unroll
    for (int i = 0; i < 16; ++i) ptx::mma_m16n8k16_f32_bf16(sums[i], a, b[0], b[1]);
  }
  float sum = 0;
  for (int i = 0; i < 16; ++i) sum += sums[i][0] + sums[i][1] + sums[i][2] + sums[i][3];
  out[blockIdx.x * blockDim.x + threadIdx.x] = sum;
}

// Two warpgroups, each 64 x 256 x 64 per round, both operands in shared memory: 48 KB.
extern "C" __global__ void __launch_bounds__(256, 1) wgmma_rate(const uint32_t* words, int rounds, float* out) {
  extern __shared__ __align__(1024) unsigned char memory[];
  for (int i = threadIdx.x; i < 12 * 1024; i += 256) reinterpret_cast<uint32_t*>(memory)[i] = words[i];
  ptx::fence_proxy_async_shared_cta();
  __syncthreads();
  using Mma = ptx::Wgmma<256, ptx::WgmmaType::kBf16>;
  using TileA = tile::AlongColumns<64>;
  using TileB = tile::AlongColumns<256>;
  const int warpgroup = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x / 128), 0);
  const uint32_t b = TileB::base(ptx::shared_address(memory)),
                 a = TileA::base(ptx::shared_address(memory) + 32768 + warpgroup * 8192);
  float sums[Mma::kCount];
#pragma unroll
  for (int i = 0; i < Mma::kCount; ++i) sums[i] = 0;
  for (int round = 0; round < rounds; ++round) {
    ptx::wgmma_fence();
    tile::multiply<Mma, TileA, TileB, 4>(sums, a, b, true);
    ptx::wgmma_commit_group();
    ptx::wgmma_wait_group<1>();
  }
  ptx::wgmma_wait_group<0>();
  ptx::tie_registers(sums);
  float sum = 0;
#pragma unroll
  for (int i = 0; i < Mma::kCount; ++i) sum += sums[i];
  out[blockIdx.x * blockDim.x + threadIdx.x] = sum;
}

// Exponentials of base 2, eight per round and thread.
extern "C" __global__ void exp_rate(int rounds, float* out) {
  float values[8];
  for (int i = 0; i < 8; ++i) values[i] = -0.001f * static_cast<float>(threadIdx.x + i);
#pragma unroll 1
  for (int round = 0; round < rounds; ++round) {
#pragma unroll
    for (int i = 0; i < 8; ++i) values[i] = ptx::ex2_approx_ftz_f32(values[i]);
  }
  float sum = 0;
  for (int i = 0; i < 8; ++i) sum += values[i];
  out[blockIdx.x * blockDim.x + threadIdx.x] = sum;
}
