// The producer warp of the forward in FP8: one lane takes tiles, tells the consumers, and keeps the copy engine ahead
// of them. The values of a block are asked for after the keys of the next one, as stages become free.
#pragma once

#include "kernel_pytorch/cuda/ptx/tensor_copy.cuh"
#include "kernel_pytorch/ops/attention/cuda/walk.cuh"
#include "kernel_pytorch/ops/attention/sm90/forward/schedule.cuh"
#include "kernel_pytorch/ops/attention/sm90/forward_fp8/tile_cuda.h"

namespace kernel_pytorch::attention::fp8 {

// The keys of a tile of queries, last block first.
struct Blocks {
  int32_t first, last;              // the first keys of the first and of the last block
  int32_t whole_first, whole_last;  // blocks between these see every score

  __device__ __forceinline__ int32_t count() const { return first < last ? 0 : (first - last) / kTile + 1; }
};
template <Features kFeatures>
__device__ __forceinline__ Blocks blocks_of(const Head& head, int32_t query_tile) {
  const int32_t query = query_tile * kTile;
  const TileRange range = keys_of_queries(kFeatures, head, query, least(query + kTile, head.queries));
  if (range.first >= range.last) return {0, 1, 0, 0};
  return {(range.last - 1) / kTile * kTile, range.first / kTile * kTile, range.whole_first, range.whole_last};
}

template <ForwardConfig kConfig, Features kFeatures>
class Producer {
 public:
  __device__ __forceinline__ Producer(const ForwardArguments& arguments, Sm90Shared& shared, uint32_t tiles)
      : arguments_(arguments.base), shared_(shared), writer_(shared), tiles_(tiles) {}

  // By one thread.
  __device__ __forceinline__ void run() {
    ptx::prefetch_tensormap(&arguments_.query);
    ptx::prefetch_tensormap(&arguments_.key);
    ptx::prefetch_tensormap(&arguments_.value);
    const int32_t total = arguments_.order.total;
    int32_t index = static_cast<int32_t>(blockIdx.x);
#pragma unroll 1
    while (index < total) {
      const int32_t next = take_tile(arguments_, total);  // asked for now, needed after this tile
      produce(tile_at<kFeatures>(arguments_, index, TileKind::kWork));
      index = next;
    }
    writer_.publish({0, 0, 0, TileKind::kEnd});
  }

 private:
  __device__ __forceinline__ void produce(const Sm90Tile& tile) {
    const Head head = load_head<kFeatures>(arguments_.score, tile.batch, tile.head);
    const Blocks blocks = blocks_of<kFeatures>(head, tile.query_tile);
    if (blocks.count() == 0) {
      writer_.publish({tile.batch, tile.head, tile.query_tile, TileKind::kEmpty});
      return;
    }
    writer_.publish(tile);
    shared_.query_empty[query_.stage].wait(query_.parity ^ 1);
    load(tiles_ + query_.stage * kTileBytes, arguments_.query, kTileBytes, 0, tile.query_tile * kTile, tile.head,
         tile.batch, shared_.query_full[query_.stage]);
    query_.advance(kQueryBuffers);
    const int32_t key_head = tile.head / arguments_.score.group;
#pragma unroll 1
    for (int32_t key = blocks.first; key >= blocks.last; key -= kTile) {
      shared_.key_empty[key_.stage].wait(key_.parity ^ 1);
      load(tiles_ + keys_at(kConfig) + key_.stage * kTileBytes, arguments_.key, kTileBytes, 0, key, key_head,
           tile.batch, shared_.key_full[key_.stage]);
      key_.advance(kConfig.stages);
      if (key != blocks.first) load_values(key + kTile, key_head, tile.batch);
    }
    load_values(blocks.last, key_head, tile.batch);
  }
  __device__ __forceinline__ void load_values(int32_t key, int32_t head, int32_t batch) {
    shared_.value_empty[value_.stage].wait(value_.parity ^ 1);
    load(tiles_ + values_at(kConfig) + value_.stage * value_bytes(kConfig), arguments_.value, value_bytes(kConfig), key,
         0, head, batch, shared_.value_full[value_.stage]);
    value_.advance(kConfig.stages);
  }
  static __device__ __forceinline__ void load(uint32_t target, const tile::TensorMap& map, uint32_t bytes,
                                              int32_t column, int32_t row, int32_t head, int32_t batch,
                                              tile::Barrier& full) {
    full.arrive_expect_bytes(bytes);
    ptx::cp_async_bulk_tensor_4d_shared_global(target, &map, column, row, head, batch, full.address());
  }

  const Sm90ForwardArguments& arguments_;
  Sm90Shared& shared_;
  TileWriter<kFeatures> writer_;
  uint32_t tiles_;  // shared memory
  tile::PipelineState query_, key_, value_;
};

}  // namespace kernel_pytorch::attention::fp8
