// The producer warp: takes tiles, tells the consumers, and keeps the copy engine ahead of them. Queries, keys and
// values go through rings of barriers of their own; the values of a block are asked for after the keys of the next one,
// since that is the order in which room for them comes free.
#pragma once

#include "kernel_pytorch/cuda/ptx/tensor_copy.cuh"
#include "kernel_pytorch/cuda/tile/matrix_descriptor.cuh"
#include "kernel_pytorch/ops/attention/attention_sm90_schedule_cuda.cuh"
#include "kernel_pytorch/ops/attention/attention_walk_cuda.cuh"

namespace kernel_pytorch::attention {

template <Sm90Config kConfig, Features kFeatures>
class Sm90Producer {
  static constexpr int kQueries = sm90_queries(kConfig);
  static constexpr int kKeys = kConfig.key_block;
  using KeyWalk = Walk<kFeatures, true, kQueries, kKeys>;

 public:
  __device__ __forceinline__ Sm90Producer(const Sm90ForwardArguments& arguments, Sm90Shared& shared, uint32_t tiles)
      : arguments_(arguments), shared_(shared), writer_(shared), tiles_(tiles) {}

  // By one whole warp.
  __device__ __forceinline__ void run() {
    const bool leads = threadIdx.x % 32 == 0;
    if (leads) {
      ptx::prefetch_tensormap(&arguments_.query);
      ptx::prefetch_tensormap(&arguments_.key);
      ptx::prefetch_tensormap(&arguments_.value);
    }
    const TileKind kind = arguments_.careful ? TileKind::kRedo : TileKind::kWork;
    const int32_t total = tile_count<kFeatures>(arguments_);
    int32_t index = static_cast<int32_t>(blockIdx.x);
    while (index < total) {
      int32_t next = 0;
      if (leads) next = take_tile(arguments_, total);  // asked for now, needed after this tile
      produce(tile_at<kFeatures>(arguments_, index, kind), leads);
      index = __shfl_sync(0xffffffffu, next, 0);
    }
    flush_values(leads);
    if (leads) writer_.publish({0, 0, 0, TileKind::kDrain});
    shared_.drained.wait(0);
    index = shared_.redo_first;
    while (index != kNoTile) {
      produce(redo_tile(arguments_, index), leads);
      index = arguments_.redo_links[index];
    }
    flush_values(leads);
    if (leads) writer_.publish({0, 0, 0, TileKind::kEnd});
  }

 private:
  __device__ __forceinline__ void produce(const Sm90Tile& tile, bool leads) {
    const Head head = load_head<kFeatures>(arguments_.score, tile.batch, tile.head);
    const int32_t first_query = tile.query_tile * kQueries;
    const KeyWalk walk(arguments_.score, head, first_query);
    const int32_t count = walk.count();
    if (leads) {
      writer_.publish(count > 0 ? tile : Sm90Tile{tile.batch, tile.head, tile.query_tile, TileKind::kEmpty});
      const int32_t key_head = tile.head / arguments_.score.group, tensor = kFeatures.packed ? 0 : tile.batch;
      if (count > 0) load_queries(static_cast<int32_t>(head.first_query) + first_query, tile.head, tensor);
      if constexpr (!reads_steps(kFeatures)) {
#pragma unroll 1
        for (int32_t i = 0; i < count; ++i) {
          wait_for_key_room();
          load_step(static_cast<int32_t>(head.first_key) + walk.at(i).first, key_head, tensor);
        }
      }
    }
    __syncwarp();
    if constexpr (reads_steps(kFeatures)) produce_listed(walk, head, tile, leads);
  }

  // Steps that have to be read: 32 at a time, one by each lane, so that they are waited for together.
  __device__ __forceinline__ void produce_listed(const KeyWalk& walk, const Head& head, const Sm90Tile& tile,
                                                 bool leads) {
    const int32_t key_head = tile.head / arguments_.score.group, tensor = kFeatures.packed ? 0 : tile.batch;
    const int32_t count = walk.count(), lane = static_cast<int32_t>(threadIdx.x % 32);
#pragma unroll 1
    for (int32_t begin = 0; begin < count; begin += 32) {
      Sm90Step mine{};
      if (begin + lane < count) {
        const Step step = walk.at(begin + lane);
        const uint32_t last = begin + lane == count - 1 ? kStepIsLast : 0;
        mine = {step.first, flags_of<kFeatures, kKeys>(step, head, tile.query_tile * kQueries) | last};
      }
      const int32_t end = least(count, begin + 32);
#pragma unroll 1
      for (int32_t i = begin; i < end; ++i) {
        const Sm90Step step{__shfl_sync(0xffffffffu, mine.first, i - begin),
                            __shfl_sync(0xffffffffu, mine.flags, i - begin)};
        if (!leads) continue;
        wait_for_key_room();
        shared_.steps[key_.stage] = step;
        load_step(static_cast<int32_t>(head.first_key) + step.first, key_head, tensor);
      }
    }
  }

  __device__ __forceinline__ void load_step(int32_t row, int32_t head, int32_t tensor) {
    load_keys(row, head, tensor);
    if (has_values_) load_values();
    has_values_ = true;
    value_row_ = row;
    value_head_ = head;
    value_tensor_ = tensor;
  }

  __device__ __forceinline__ void flush_values(bool leads) {
    if (leads && has_values_) load_values();
    has_values_ = false;
    __syncwarp();
  }

  template <int kRows, int kSize>
  __device__ __forceinline__ void load(uint32_t target, const tile::TensorMap& map, int32_t row, int32_t head,
                                       int32_t tensor, tile::Barrier& full) {
    constexpr int kChunkBytes = kRows * tile::kChunkRowBytes;
    full.arrive_expect_bytes(sm90_chunks(kSize) * kChunkBytes);
#pragma unroll
    for (int chunk = 0; chunk < sm90_chunks(kSize); ++chunk) {
      ptx::cp_async_bulk_tensor_4d_shared_global(target + chunk * kChunkBytes, &map, chunk * tile::kChunkColumns, row,
                                                 head, tensor, full.address());
    }
  }

  __device__ __forceinline__ void load_queries(int32_t row, int32_t head, int32_t tensor) {
    shared_.query_empty[query_.stage].wait(query_.parity ^ 1);
    load<kQueries, kConfig.head_size>(tiles_ + query_.stage * sm90_query_bytes(kConfig), arguments_.query, row, head,
                                      tensor, shared_.query_full[query_.stage]);
    query_.advance(kConfig.query_buffers);
  }
  __device__ __forceinline__ void wait_for_key_room() {
    shared_.key_empty[key_.stage].wait(key_.parity ^ 1);
  }
  __device__ __forceinline__ void load_keys(int32_t row, int32_t head, int32_t tensor) {
    load<kKeys, kConfig.head_size>(tiles_ + sm90_keys_at(kConfig) + key_.stage * sm90_key_bytes(kConfig),
                                   arguments_.key, row, head, tensor, shared_.key_full[key_.stage]);
    key_.advance(kConfig.stages);
  }
  // Of the block whose keys were asked for before.
  __device__ __forceinline__ void load_values() {
    shared_.value_empty[value_.stage].wait(value_.parity ^ 1);
    load<kKeys, kConfig.value_size>(tiles_ + sm90_values_at(kConfig) + value_.stage * sm90_value_bytes(kConfig),
                                    arguments_.value, value_row_, value_head_, value_tensor_,
                                    shared_.value_full[value_.stage]);
    value_.advance(kConfig.stages);
  }

  const Sm90ForwardArguments& arguments_;
  Sm90Shared& shared_;
  TileWriter writer_;
  uint32_t tiles_;  // shared memory
  tile::PipelineState query_, key_, value_;
  bool has_values_ = false;
  int32_t value_row_ = 0, value_head_ = 0, value_tensor_ = 0;
};

}  // namespace kernel_pytorch::attention
