// The thread of the backward that asks the copy engine for tiles, and the warpgroup that sums dQ: it multiplies dS by
// K, 64 columns at a time, and adds the accumulators as they are to sums in global memory. sm_90a.
#pragma once

#include "kernel_pytorch/cuda/ptx/named_barrier.cuh"
#include "kernel_pytorch/cuda/ptx/tensor_copy.cuh"
#include "kernel_pytorch/cuda/tile/bulk.cuh"
#include "kernel_pytorch/ops/attention/sm90/backward/plan.cuh"

namespace kernel_pytorch::attention {

// Boxes of 64 rows by 64 columns until the tile is full.
template <int kRows, int kColumns>
__device__ __forceinline__ void load_boxes(uint32_t destination, const tile::TensorMap& map, int row, int head,
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
  BackwardWork& work;
  uint32_t shared;
  BackwardBarriers<kTile>& barriers;
  tile::PipelineState ring{0, 1};
  int32_t step = 0;

  __device__ __forceinline__ TileLoader(const BackwardArguments& arguments, BackwardWork& work, uint32_t shared,
                                        BackwardBarriers<kTile>& barriers)
      : arguments(arguments), work(work), shared(shared), barriers(barriers) {}

  __device__ __forceinline__ void load_keys() {
    barriers.key->arrive_expect_bytes(Shared::kKeyBytes);
    const int row = static_cast<int>(work.head.first_key) + work.first_key;
    load_boxes<kTile.keys, kTile.head>(shared + Shared::kKey, arguments.key, row, work.key_head, work.memory_batch,
                                       *barriers.key);
    barriers.value->arrive_expect_bytes(Shared::kValueBytes);
    load_boxes<kTile.keys, kTile.value>(shared + Shared::kValue, arguments.value, row, work.key_head, work.memory_batch,
                                        *barriers.value);
  }

  // Called once every warp has released the stage.
  template <Features kFeatures>
  __device__ __forceinline__ void load(const Step& next, int member) {
    const int tile = next.first / kTile.queries;
    const int head = work.head.head + member;
    const int row = static_cast<int>(work.head.first_query) + next.first;
    tile::Barrier& query = barriers.query_full[ring.stage];
    SegmentRange range{0, 0, 0, kSegmentRangeRows};  // if ids are not compared
    if constexpr (compares_ranges(kFeatures)) {
      static_assert(kTile.queries == kSegmentRangeRows);
      const SegmentIds& ids = arguments.score.query_segments;
      if (!next.skips_segments) range = ids.ranges[work.head.batch * ids.ranges_batch + tile];
    }
    barriers.query_empty[ring.stage].wait(ring.parity);
    if constexpr (compares_ranges(kFeatures)) work.ranges[step % kBackwardSteps] = range;
    work.ring[step++ % kBackwardSteps] = {tile, member, next.is_edge, next.skips_program, next.skips_segments};
    query.arrive_expect_bytes(Shared::kQueryBytes + Shared::kRecordBytes);
    load_boxes<kTile.queries, kTile.head>(shared + Shared::kQuery + ring.stage * Shared::kQueryBytes, arguments.query,
                                          row, head, work.memory_batch, query);
    const int64_t record = work.tile_base + static_cast<int64_t>(member) * arguments.tiles.tiles + tile;
    tile::copy_to_shared(shared + Shared::kRecord + ring.stage * Shared::kRecordBytes,
                         arguments.records + record * (2 * kTile.queries), Shared::kRecordBytes, query);
    tile::Barrier& grad = barriers.grad_full[ring.stage];
    barriers.grad_empty[ring.stage].wait(ring.parity);
    grad.arrive_expect_bytes(Shared::kGradBytes);
    load_boxes<kTile.queries, kTile.value>(shared + Shared::kGrad + ring.stage * Shared::kGradBytes,
                                           arguments.grad_output, row, head, work.memory_batch, grad);
    ring.advance(kTile.stages);
  }
};

// By the first warp: barriers, the keys and values on their way, and while those travel the block's share of queries,
// whose ends may have to be looked for. Others see it after a barrier of the block.
template <Features kFeatures, BackwardTile kTile>
__device__ __forceinline__ void begin_block(const BackwardArguments& arguments, BackwardWork& shared_work, int block,
                                            const char* shared_memory, BackwardBarriers<kTile>& barriers) {
  BackwardWork work = find_keys<kFeatures, kTile>(arguments, block);
  if (threadIdx.x == 0) {
    barriers.init();
    ptx::fence_proxy_async_shared_cta();
    if (work.first_key < work.head.keys) {
      TileLoader<kTile>(arguments, work, ptx::shared_address(shared_memory), barriers).load_keys();
    }
  }
  find_steps<kFeatures, kTile>(work, arguments.score);
  if (threadIdx.x == 0) {
    shared_work.head = work.head;
    shared_work.key_head = work.key_head;
    shared_work.section = work.section;
    shared_work.memory_batch = work.memory_batch;
    shared_work.first_key = work.first_key;
    shared_work.rows = work.rows;
    shared_work.tile_base = work.tile_base;
    shared_work.steps = work.steps;
    if constexpr (!kFeatures.blocks) shared_work.span = work.span;
  }
}

template <Features kFeatures, BackwardTile kTile>
__device__ __forceinline__ QueryWalk<kFeatures, kTile> walk_of(const ScoreArguments& score, const Head& head,
                                                               const BackwardWork& work) {
  if constexpr (kFeatures.blocks) {
    return QueryWalk<kFeatures, kTile>(score, head, work.first_key);
  } else {
    return QueryWalk<kFeatures, kTile>(score, head, work.first_key, work.span);
  }
}

// By a warp, whose first lane loads. Each lane looks at one of the next 32 steps, since that may read lists or ids.
template <Features kFeatures, BackwardTile kTile>
__device__ __forceinline__ void load_tiles(const BackwardArguments& arguments, BackwardWork& work,
                                           const char* shared_memory, BackwardBarriers<kTile>& barriers) {
  const int lane = static_cast<int>(threadIdx.x % 32);
  TileLoader<kTile> loader(arguments, work, ptx::shared_address(shared_memory), barriers);
  // Keys beyond the last have to be hidden in every tile.
  const bool is_ragged = work.first_key + kTile.keys > work.head.keys;
#pragma unroll 1
  for (int member = 0; member < arguments.score.group; ++member) {
#pragma unroll 1
    for (int first = 0;; first += 32) {
      const Head head = head_of_member<kFeatures>(arguments.score, work.head, member);
      const QueryWalk<kFeatures, kTile> walk = walk_of<kFeatures, kTile>(arguments.score, head, work);
      const int count = least(32, walk.count() - first);
      if (count <= 0) break;
      if (lane < count) work.upcoming[lane] = walk.at(first + lane);
      __syncwarp();
#pragma unroll 1
      for (int i = 0; lane == 0 && i < count; ++i) {
        Step step = work.upcoming[i];
        step.is_edge |= is_ragged;
        loader.template load<kFeatures>(step, member);
      }
      __syncwarp();
    }
  }
}

// Blocks of keys that add to a tile of queries before this one does: those after it.
template <Features kFeatures, BackwardTile kTile>
__device__ __forceinline__ uint32_t turn_of(const BackwardWork& work, int tile) {
  const int first = tile * kTile.queries;
  const TileRange range = keys_of_queries(kFeatures, work.head, first, least(first + kTile.queries, work.head.queries));
  return static_cast<uint32_t>((range.last - 1) / kTile.keys - work.first_key / kTile.keys);
}

// By warps that have nothing else to do: zeros in this block's share of the sums of a section to come.
template <BackwardTile kTile>
__device__ __forceinline__ void zero_sums_ahead(const BackwardArguments& arguments, int block) {
  const BackwardOrder& order = arguments.order;
  const UnitBlock at = unit_block(order, block);
  const ZeroedSums& zeroed = arguments.zeroed;
  const int section = at.unit / zeroed.section_units + zeroed.sections_ahead;
  if (at.key_block >= order.full_blocks || section >= zeroed.sections) return;
  const int64_t vectors =
      int64_t{zeroed.section_units * arguments.score.group} * arguments.tiles.tiles * (kTile.queries * kTile.head / 4);
  const int blocks = zeroed.section_units * order.full_blocks;
  const int64_t share = (vectors + blocks - 1) / blocks;
  const int64_t first = share * (at.unit % zeroed.section_units * order.full_blocks + at.key_block);
  const int64_t last = first + share < vectors ? first + share : vectors;
  float* sums = arguments.grad_query_sums + section * vectors * 4;
#pragma unroll 4
  for (int64_t i = first + threadIdx.x % 128 - 32; i < last; i += 32 * kZeroWarps) {
    ptx::st_global_v4(sums + i * 4, {0, 0, 0, 0});
  }
  __syncwarp();
  if (threadIdx.x % 32 == 0) {
    __threadfence();
    atomicAdd(zeroed.counts + section, 1u);
  }
}
// Before the first addition, by one thread for others that meet it at a barrier.
__device__ __forceinline__ void wait_for_zeroed_sums(const BackwardArguments& arguments, int section) {
  const volatile uint32_t* count = arguments.zeroed.counts + section;
  const int blocks = arguments.zeroed.section_units * arguments.order.full_blocks;
  while (*count != static_cast<uint32_t>(kZeroWarps * blocks)) {
  }
  __threadfence();
}

template <class T, Features kFeatures, BackwardTile kTile>
__device__ __forceinline__ void add_query_gradients(const BackwardArguments& arguments, const BackwardWork& work,
                                                    const char* shared_memory, BackwardBarriers<kTile>& barriers) {
  using Shared = BackwardShared<kTile>;
  constexpr int kColumns = kTile.sum_columns;
  using Mma = ptx::Wgmma<kColumns, kMmaType<T>>;
  using KeyRows = tile::AlongRows<kTile.keys>;
  constexpr int kTileFloats = kTile.queries * kTile.head;
  constexpr int kBarrier = 1;
  const uint32_t shared = ptx::shared_address(shared_memory);
  const uint32_t keys = KeyRows::base(shared + Shared::kKey);
  tile::PipelineState ring;
  if (work.section >= arguments.zeroed.sections_ahead) {
    if (threadIdx.x % 128 == 0) wait_for_zeroed_sums(arguments, work.section);
    ptx::barrier_sync(kBarrier, 128);
  }
  barriers.key->wait(0);
#pragma unroll 1
  for (int step = 0; step < work.steps; ++step) {
    barriers.score_full[ring.stage].wait(ring.parity);
    const BackwardStep& at = work.ring[step % kBackwardSteps];
    const int64_t tile = work.tile_base + static_cast<int64_t>(at.member) * arguments.tiles.tiles + at.tile;
    float* sums = arguments.grad_query_sums + tile * kTileFloats + threadIdx.x % 128 * 4;
    const uint32_t scores = KeyRows::base(shared + Shared::kScore + ring.stage * Shared::kScoreBytes);
    if (kTile.in_turns) {
      if (threadIdx.x % 128 == 0) {
        const volatile uint32_t* turn = arguments.turns + tile;
        while (*turn != turn_of<kFeatures, kTile>(work, at.tile)) {
        }
        __threadfence();
      }
      ptx::barrier_sync(kBarrier, 128);
    }
    constexpr int kAcross = kTile.head / kColumns;
    constexpr int kProducts = kTile.queries / 64 * kAcross;
#pragma unroll
    for (int i = 0; i < kProducts; ++i) {
      float sum[kColumns / 2];
      ptx::wgmma_fence();
      tile::multiply<Mma, KeyRows, KeyRows, kTile.keys / 16>(
          sum, scores + i / kAcross * (kTile.keys * 128 / 16),
          keys + i % kAcross * kColumns / 64 * (kTile.keys * 128 / 16) + i % kAcross * kColumns % 64 / 8, false);
      ptx::wgmma_commit_group();
      ptx::wgmma_wait_group<0>();
      ptx::tie_registers(sum);
      if (i == kProducts - 1 && threadIdx.x % 32 == 0) barriers.score_empty[ring.stage].arrive();
#pragma unroll
      for (int j = 0; j < kColumns / 8; ++j) {
        ptx::red_global_add_v4_f32(sums + (i * (kColumns / 8) + j) * 512, sum[4 * j], sum[4 * j + 1], sum[4 * j + 2],
                                   sum[4 * j + 3]);
      }
    }
    if (kTile.in_turns) {
      __threadfence();
      ptx::barrier_sync(kBarrier, 128);
      if (threadIdx.x % 128 == 0) atomicAdd(arguments.turns + tile, 1u);
    }
    ring.advance(kTile.score_stages);
  }
}

}  // namespace kernel_pytorch::attention
