// The producer warp: takes tiles, tells the consumers, and keeps the copy engine ahead of them. Queries, keys and
// values go through rings of barriers of their own; the values of a block are asked for after the keys of the next one,
// because that is the order in which stages become free.
#pragma once

#include "kernel_pytorch/cuda/ptx/tensor_copy.cuh"
#include "kernel_pytorch/cuda/tile/matrix_descriptor.cuh"
#include "kernel_pytorch/ops/attention/cuda/walk.cuh"
#include "kernel_pytorch/ops/attention/sm90/forward/schedule.cuh"

namespace kernel_pytorch::attention {

template <Sm90Config kConfig, Features kFeatures>
class Sm90Producer {
  static constexpr int kQueries = sm90_queries(kConfig);
  static constexpr int kKeys = kConfig.key_block;
  using KeyWalk = Walk<kFeatures, true, kQueries, kKeys, true>;

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
    if constexpr (reads_steps(kFeatures)) {
      run_listed(leads);
    } else {
      run_plain(leads);
    }
  }

 private:
  __device__ __forceinline__ TileKind kind() const { return arguments_.careful ? TileKind::kRedo : TileKind::kWork; }

  __device__ __forceinline__ void run_plain(bool leads) {
    const int32_t total = tile_count<kFeatures>(arguments_);
    int32_t index = static_cast<int32_t>(blockIdx.x);
    while (index < total) {
      int32_t next = 0;
      if (leads) next = take_tile(arguments_, total);  // asked for now, needed after this tile
      produce(tile_at<kFeatures>(arguments_, index, kind()), leads);
      index = __shfl_sync(0xffffffffu, next, 0);
    }
    index = end_first_pass(leads);
    while (index != kNoTile) {
      produce(tile_at_place(arguments_, index, TileKind::kRedo), leads);
      index = arguments_.redo_links[index];
    }
    end_passes(leads);
  }
  __device__ __forceinline__ void produce(const Sm90Tile& tile, bool leads) {
    const Head head = load_head<kFeatures>(arguments_.score, tile.batch, tile.head);
    const KeyWalk walk(arguments_.score, head, tile.query_tile * kQueries);
    if (leads) {
      begin(tile, head, walk.count(), walk.span());
      const int32_t key_head = tile.head / arguments_.score.group;
#pragma unroll 1
      for (int32_t i = 0; i < walk.count(); ++i) {
        wait_for_free_key_stage();
        load_step(static_cast<int32_t>(head.first_key) + walk.at(i).first, key_head, tensor_of(tile));
      }
    }
    __syncwarp();
  }

  // A tile whose steps have to be read: looked for while the tile before it is on its way, since several reads follow
  // from one another. Each lane has one of its first 32 steps.
  struct Upcoming {
    Sm90Tile tile;
    int32_t count;
    Sm90Step step;
    bool is_tile;
  };
  __device__ __forceinline__ void run_listed(bool leads) {
    const int32_t total = tile_count<kFeatures>(arguments_);
    int32_t next = static_cast<int32_t>(blockIdx.x), index = 0;
    bool redoes = false;
    Upcoming now{};
#pragma unroll 1
    while (true) {
      if (now.is_tile) {
        if (redoes) {
          next = arguments_.redo_links[index];
        } else if (leads) {
          next = take_tile(arguments_, total);
        }
      }
      Upcoming then{};
      produce_listed(now, leads, [&] {
        index = __shfl_sync(0xffffffffu, next, 0);
        if (redoes ? index == kNoTile : index >= total) return;
        then = look(redoes ? tile_at_place(arguments_, index, TileKind::kRedo)
                           : tile_at<kFeatures>(arguments_, index, kind()));
      });
      now = then;
      if (now.is_tile) continue;
      if (redoes) break;
      next = end_first_pass(leads);
      redoes = true;
    }
    end_passes(leads);
  }
  __device__ __forceinline__ Upcoming look(const Sm90Tile& tile) const {
    const Head head = load_head<kFeatures>(arguments_.score, tile.batch, tile.head);
    const KeyWalk walk(arguments_.score, head, tile.query_tile * kQueries);
    return {tile, walk.count(), step_of(walk, head, tile, static_cast<int32_t>(threadIdx.x % 32)), true};
  }
  static __device__ __forceinline__ Sm90Step step_of(const KeyWalk& walk, const Head& head, const Sm90Tile& tile,
                                                     int32_t i) {
    if (i >= walk.count()) return {};
    const Step step = walk.at(i);
    const uint32_t last = i == walk.count() - 1 ? kStepIsLast : 0;
    return {step.first, flags_of<kFeatures, kKeys>(step, head, tile.query_tile * kQueries) | last};
  }
  // Calls look_ahead once, when the consumers have some steps to do.
  template <class LookAhead>
  __device__ __forceinline__ void produce_listed(const Upcoming& now, bool leads, const LookAhead& look_ahead) {
    const Head head = load_head<kFeatures>(arguments_.score, now.tile.batch, now.tile.head);
    if (leads && now.is_tile) begin(now.tile, head, now.count, {});
    const int32_t ahead = least(2, now.count);
    const int32_t key_head = now.tile.head / arguments_.score.group;
    Sm90Step steps = now.step;
#pragma unroll 1
    for (int32_t i = 0;; ++i) {
      if (i == ahead) look_ahead();
      if (i >= now.count) break;
      if (i % 32 == 0 && i > 0) steps = later_steps(now, head, i);
      const Sm90Step step{__shfl_sync(0xffffffffu, steps.first, i % 32), __shfl_sync(0xffffffffu, steps.flags, i % 32)};
      if (!leads) continue;
      wait_for_free_key_stage();
      shared_.steps[key_.stage] = step;
      load_step(static_cast<int32_t>(head.first_key) + step.first, key_head, tensor_of(now.tile));
    }
  }
  __device__ __forceinline__ Sm90Step later_steps(const Upcoming& now, const Head& head, int32_t i) const {
    const int32_t first_query = now.tile.query_tile * kQueries, at = i + static_cast<int32_t>(threadIdx.x % 32);
    return step_of(KeyWalk(arguments_.score, head, first_query), head, now.tile, at);
  }

  // Returns the first tile that has to be done again.
  __device__ __forceinline__ int32_t end_first_pass(bool leads) {
    flush_values(leads);
    if (leads) writer_.publish({0, 0, 0, TileKind::kDrain});
    shared_.drained.wait(0);
    return shared_.redo_first;
  }
  __device__ __forceinline__ void end_passes(bool leads) {
    flush_values(leads);
    if (leads) writer_.publish({0, 0, 0, TileKind::kEnd});
  }

  __device__ __forceinline__ void begin(const Sm90Tile& tile, const Head& head, int32_t count, const WalkSpan& span) {
    writer_.publish(count > 0 ? tile : Sm90Tile{tile.batch, tile.head, tile.query_tile, TileKind::kEmpty}, span);
    if (count == 0) return;
    load_queries(static_cast<int32_t>(head.first_query) + tile.query_tile * kQueries, tile.head, tensor_of(tile));
  }
  static __device__ __forceinline__ int32_t tensor_of(const Sm90Tile& tile) {
    return kFeatures.packed ? 0 : tile.batch;
  }

  __device__ __forceinline__ void load_step(int32_t row, int32_t head, int32_t tensor) {
    load_keys(row, head, tensor);
    if (has_values_) load_values(before(before(key_)));
    has_values_ = true;
    value_row_ = row;
    value_head_ = head;
    value_tensor_ = tensor;
  }

  __device__ __forceinline__ void flush_values(bool leads) {
    if (leads && has_values_) load_values(before(key_));
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
  __device__ __forceinline__ void wait_for_free_key_stage() {
    shared_.key_empty[key_.stage].wait(key_.parity ^ 1);
  }
  __device__ __forceinline__ void load_keys(int32_t row, int32_t head, int32_t tensor) {
    load<kKeys, kConfig.head_size>(tiles_ + sm90_keys_at(kConfig) + key_.stage * sm90_key_bytes(kConfig),
                                   arguments_.key, row, head, tensor, shared_.key_full[key_.stage]);
    key_.advance(kConfig.stages);
  }
  // Loads the values of the block whose keys were requested before, into this stage of their ring.
  __device__ __forceinline__ void load_values(const tile::PipelineState& value) {
    shared_.value_empty[value.stage].wait(value.parity ^ 1);
    load<kKeys, kConfig.value_size>(tiles_ + sm90_values_at(kConfig) + value.stage * sm90_value_bytes(kConfig),
                                    arguments_.value, value_row_, value_head_, value_tensor_,
                                    shared_.value_full[value.stage]);
  }
  static __device__ __forceinline__ tile::PipelineState before(const tile::PipelineState& state) {
    const bool wraps = state.stage == 0;
    return {wraps ? kConfig.stages - 1 : state.stage - 1, state.parity ^ static_cast<uint32_t>(wraps)};
  }

  const Sm90ForwardArguments& arguments_;
  Sm90Shared& shared_;
  TileWriter<kFeatures> writer_;
  uint32_t tiles_;  // shared memory
  tile::PipelineState query_, key_;
  bool has_values_ = false;
  int32_t value_row_ = 0, value_head_ = 0, value_tensor_ = 0;
};

}  // namespace kernel_pytorch::attention
