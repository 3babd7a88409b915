// The thread of the backward that asks the copy engine for tiles, and the warpgroup that sums dQ: it multiplies dS by
// K, 64 columns at a time, and adds the accumulators as they are to sums in global memory. sm_90a.
#pragma once

#include "kernel_pytorch/cuda/ptx/tensor_copy.cuh"
#include "kernel_pytorch/cuda/tile/bulk.cuh"
#include "kernel_pytorch/ops/attention/attention_sm90_backward_plan_cuda.cuh"

namespace kernel_pytorch::attention {

// Boxes of 64 rows by 64 columns until the tile is full.
template <int kRows, int kColumns>
__device__ __forceinline__ void load_tile(uint32_t destination, const tile::TensorMap& map, int row, int head,
                                          int batch, const tile::Barrier& barrier) {
#pragma unroll
  for (int column = 0; column < kColumns; column += 64) {
#pragma unroll
    for (int box = 0; box < kRows; box += 64) {
      ptx::cp_async_bulk_tensor_4d_shared_global(destination + (column / 64 * kRows + box) * 128, &map, column,
                                                 row + box, head, batch, barrier.address());
    }
  }
}

template <BackwardTile kTile>
struct TileLoader {
  using Shared = BackwardShared<kTile>;
  const BackwardArguments& arguments;
  const BackwardWork& work;
  uint32_t shared;
  BackwardBarriers& barriers;
  TileWalk walk;
  tile::PipelineState ring{0, 1};

  __device__ __forceinline__ TileLoader(const BackwardArguments& arguments, const BackwardWork& work, uint32_t shared,
                                        BackwardBarriers& barriers)
      : arguments(arguments), work(work), shared(shared), barriers(barriers), walk(work) {}

  __device__ __forceinline__ void load_keys() {
    barriers.key->arrive_expect_bytes(Shared::kKeyBytes);
    const int row = static_cast<int>(work.head.first_key) + work.first_key;
    load_tile<kBackwardKeys, kTile.head>(shared + Shared::kKey, arguments.key, row, work.key_head, work.memory_batch,
                                         *barriers.key);
    barriers.value->arrive_expect_bytes(Shared::kValueBytes);
    load_tile<kBackwardKeys, kTile.value>(shared + Shared::kValue, arguments.value, row, work.key_head,
                                          work.memory_batch, *barriers.value);
  }

  // The next tile of the walk, where its place has been left by everybody.
  __device__ __forceinline__ void load_next() {
    const int head = work.head.head + walk.member;
    const int row = static_cast<int>(work.head.first_query) + walk.tile * kTile.queries;
    tile::Barrier& query = barriers.query_full[ring.stage];
    barriers.query_empty[ring.stage].wait(ring.parity);
    query.arrive_expect_bytes(Shared::kQueryBytes + Shared::kRecordBytes);
    load_tile<kTile.queries, kTile.head>(shared + Shared::kQuery + ring.stage * Shared::kQueryBytes, arguments.query,
                                         row, head, work.memory_batch, query);
    const int64_t record = work.tile_base + static_cast<int64_t>(walk.member) * arguments.tiles.tiles + walk.tile;
    tile::copy_to_shared(shared + Shared::kRecord + ring.stage * Shared::kRecordBytes,
                         arguments.records + record * (2 * kTile.queries), Shared::kRecordBytes, query);
    tile::Barrier& grad = barriers.grad_full[ring.stage];
    barriers.grad_empty[ring.stage].wait(ring.parity);
    grad.arrive_expect_bytes(Shared::kGradBytes);
    load_tile<kTile.queries, kTile.value>(shared + Shared::kGrad + ring.stage * Shared::kGradBytes,
                                          arguments.grad_output, row, head, work.memory_batch, grad);
    walk.advance(work);
    ring.advance(kTile.stages);
  }
};

template <BackwardTile kTile>
__device__ __forceinline__ void load_tiles(const BackwardArguments& arguments, const BackwardWork& work,
                                           const char* shared_memory, BackwardBarriers& barriers) {
  TileLoader<kTile> loader(arguments, work, ptx::shared_address(shared_memory), barriers);
  loader.load_keys();
#pragma unroll 1
  for (int step = 0; step < work.steps; ++step) loader.load_next();
}

template <class T, BackwardTile kTile>
__device__ __forceinline__ void add_query_gradients(const BackwardArguments& arguments, const BackwardWork& work,
                                                    const char* shared_memory, BackwardBarriers& barriers) {
  using Shared = BackwardShared<kTile>;
  constexpr int kColumns = kTile.head % 64 == 0 ? 64 : kTile.head;  // of one product
  using Mma = ptx::Wgmma<kColumns, kMmaType<T>>;
  using Rows = tile::AlongRows<kBackwardKeys>;
  const uint32_t shared = ptx::shared_address(shared_memory);
  const uint32_t keys = Rows::base(shared + Shared::kKey);
  constexpr int kTileFloats = kTile.queries * kTile.head;
  float* sums = arguments.grad_query_sums + static_cast<int64_t>(work.tile_base) * kTileFloats + threadIdx.x % 128 * 4;
  TileWalk walk(work);
  tile::PipelineState ring;
  barriers.key->wait(0);
#pragma unroll 1
  for (int step = 0; step < work.steps; ++step) {
    float* tile_sums = sums + (static_cast<int64_t>(walk.member) * arguments.tiles.tiles + walk.tile) * kTileFloats;
    barriers.score_full[ring.stage].wait(ring.parity);
    const uint32_t scores = Rows::base(shared + Shared::kScore + ring.stage * Shared::kScoreBytes);
    constexpr int kProducts = kTile.queries / 64 * (kTile.head / kColumns);
#pragma unroll
    for (int i = 0; i < kProducts; ++i) {
      constexpr int kAcross = kTile.head / kColumns;
      float sum[kColumns / 2];
      ptx::wgmma_fence();
      tile::multiply<Mma, Rows, Rows, kBackwardKeys / 16>(sum, scores + i / kAcross * (kBackwardKeys * 128 / 16),
                                                          keys + i % kAcross * (kBackwardKeys * 128 / 16), false);
      ptx::wgmma_commit_group();
      ptx::wgmma_wait_group<0>();
      ptx::tie_registers(sum);
      if (i == kProducts - 1 && threadIdx.x % 32 == 0) barriers.score_empty[ring.stage].arrive();
#pragma unroll
      for (int j = 0; j < kColumns / 8; ++j) {
        ptx::red_global_add_v4_f32(tile_sums + (i * (kColumns / 8) + j) * 512, sum[4 * j], sum[4 * j + 1],
                                   sum[4 * j + 2], sum[4 * j + 3]);
      }
    }
    walk.advance(work);
    ring.advance(kTile.score_stages);
  }
}

}  // namespace kernel_pytorch::attention
